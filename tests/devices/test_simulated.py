import pytest
import trio

from ksana.costs.step_cost import LinearStepCost
from ksana.devices.backend import WorkerInfo, WorkerLostError
from ksana.devices.inline import InlineBackend
from ksana.devices.simulated import SimulatedBackend, crash_at_steps
from ksana.devices.simulated_worker import SimulatedWorker, hashed_tokens
from ksana.devices.staging import StagingMemory
from ksana.errors import InvariantViolated, ModelLoadError
from ksana.messages.blocks import BlockCopy
from ksana.messages.staging import CopyFromStaging, CopyToStaging, StagedBlock, StagingCopied
from ksana.messages.steps import StepPlan
from ksana.runtime.virtual_clock import VirtualClock

from .plans import edits, first_plan, new_row, next_plan, plan, row


def worker(window: int | None = None, staging: StagingMemory | None = None) -> SimulatedWorker:
    num_swa_blocks = 8 if window else 0
    return SimulatedWorker(
        hashed_tokens(1000),
        block_size=4,
        num_fa_blocks=8,
        num_swa_blocks=num_swa_blocks,
        sliding_window=window,
        staging=staging,
    )


PROMPT = (11, 12, 13, 14, 15, 16)


def run_chunks(w: SimulatedWorker, request_id: int, blocks: tuple[int, ...], cached: int = 0) -> int:
    done = w.run(
        plan(
            1,
            row(request_id, cached, len(PROMPT) - cached, fa=edits(*blocks)),
            new=(new_row(request_id, PROMPT),),
        )
    )
    return done.results[0].token_ids[0]


def test_tokens_depend_on_the_prompt_not_on_the_request_or_the_cache() -> None:
    w = worker()
    cold = run_chunks(w, 1, (0, 1))
    warm = run_chunks(w, 2, (0, 5), cached=4)
    assert cold == warm
    assert run_chunks(w, 3, (2, 3)) == cold


def test_a_prefix_of_another_request_is_noticed() -> None:
    w = worker()
    w.run(plan(1, row(1, 0, 5, fa=edits(0, 1)), new=(new_row(1, (1, 2, 3, 4, 5)),)))
    with pytest.raises(InvariantViolated, match="does not hold the KV of its tokens 0 to 3"):
        run_chunks(w, 2, (0, 5), cached=4)


def test_a_block_given_away_too_early_is_noticed() -> None:
    w = worker()
    run_chunks(w, 1, (0, 1))
    w.run(plan(2, row(2, 0, 3, fa=edits(1)), new=(new_row(2, (7, 7, 7)),)))
    with pytest.raises(InvariantViolated, match="position 1 of request 1"):
        w.run(next_plan(3, 1, 6))


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (plan(2, row(1, 6, 3, sample=False), row(9, 0, 1)), "request 9"),
        (plan(2, row(1, 6, 1, fa=edits(8, first=2))), "outside the pool of 8"),
        (plan(2, row(1, 4, 1)), "sampling after token 5 of 7 known"),
        (plan(2, row(1, 6, 1, swa=edits(0))), "without sliding layers"),
    ],
)
def test_bad_plans_are_refused(bad: StepPlan, text: str) -> None:
    w = worker()
    run_chunks(w, 1, (0, 1))
    with pytest.raises(InvariantViolated, match=text):
        w.run(bad)


def test_a_window_needs_only_its_blocks() -> None:
    w = worker(window=4)
    prompt = tuple(range(12))
    new = (new_row(1, prompt),)
    w.run(plan(1, row(1, 0, 12, fa=edits(0, 1, 2), swa=edits(0, 1, 2)), new=new))
    # The token at 12 sees keys 9 to 12: sliding blocks 0 and 1 may go, 2 may not.
    w.run(plan(2, row(1, 12, 1, fa=edits(3, first=3), swa=(*edits(-1, -1), *edits(3, first=3)))))
    with pytest.raises(InvariantViolated, match="swa table of request 1 has no block at 3"):
        w.run(plan(3, row(1, 13, 1, swa=edits(-1, first=3))))


def test_fa_kv_below_the_write_start_is_not_written() -> None:
    w = worker(window=4)
    other = (1, 2, 3, 4, 5)
    w.run(plan(1, row(1, 0, 5, fa=edits(0, 1), swa=edits(0, 1)), new=(new_row(1, other),)))
    again = row(2, 0, 5, fa=edits(0, 2), swa=edits(2, 3), fa_write_start=4)
    w.run(plan(2, again, new=(new_row(2, other),)))
    wrong = row(3, 0, 5, fa=edits(0, 3), swa=edits(4, 5), fa_write_start=4)
    with pytest.raises(InvariantViolated, match="fa block 0"):
        w.run(plan(3, wrong, new=(new_row(3, (9, 9, 9, 9, 9)),)))


def test_blocks_are_copied_before_the_step() -> None:
    w = worker()
    run_chunks(w, 1, (0, 1))
    copied = StepPlan(
        pool_epoch=1,
        step_id=2,
        rows=(row(2, 5, 1, fa=edits(0, 4)),),
        new=(new_row(2, PROMPT),),
        copies=(BlockCopy(pool="fa", source=1, destination=4),),
    )
    assert w.run(copied).results[0].error is None


def test_a_row_planned_ahead_of_a_token_that_never_came_is_in_error() -> None:
    w = SimulatedWorker(lambda _request, _position: "NaN in the logits", block_size=4, num_fa_blocks=8)
    first = w.run(plan(1, row(1, 0, 6, fa=edits(0, 1)), new=(new_row(1, PROMPT),)))
    assert first.results[0].error == "NaN in the logits"
    assert "never sampled" in str(w.run(next_plan(2, 1, 6)).results[0].error)


def test_steps_take_simulated_time_one_after_the_other() -> None:
    async def main() -> None:
        cost = LinearStepCost(fixed_s=1, per_token_s=0, per_attended_token_s=0)
        backend = SimulatedBackend(worker, cost=cost, start_time_s=5)
        await backend.start(1)
        assert trio.current_time() == 5
        await backend.submit(first_plan(1, num_tokens=3))
        await backend.submit(next_plan(2, 1, 3))
        await backend.receive()
        assert trio.current_time() == 6
        done = await backend.receive()
        assert (trio.current_time(), done.times.forward_ns) == (7, 10**9)

    trio.run(main, clock=VirtualClock())


def test_faults() -> None:
    async def main() -> None:
        faults = {2: "no luck", 3: "model: gone"}
        backend = SimulatedBackend(worker, fault=crash_at_steps(2), start_fault=faults.get)
        await backend.start(1)
        await backend.submit(first_plan(1, num_tokens=3))
        await backend.submit(next_plan(2, 1, 3))
        await backend.receive()
        with pytest.raises(WorkerLostError, match="planned for step 2"):
            await backend.receive()
        with pytest.raises(WorkerLostError, match="no luck"):
            await backend.start(2)
        with pytest.raises(ModelLoadError, match="gone"):
            await backend.start(3)
        await backend.start(4)
        async with trio.open_nursery() as nursery:

            async def killer() -> None:
                await trio.sleep(1)
                backend.kill()

            nursery.start_soon(killer)
            with pytest.raises(WorkerLostError):
                await backend.receive()

    trio.run(main, clock=VirtualClock())


async def test_inline_backend() -> None:
    backend = InlineBackend(lambda: (worker(), WorkerInfo(device="inline")))
    assert (await backend.start(1)).device == "inline"
    await backend.submit(first_plan(1, num_tokens=3))
    assert (await backend.receive()).step_id == 1
    await backend.submit(next_plan(2, 7, 0))
    with pytest.raises(WorkerLostError, match="request 7"):
        await backend.receive()
    with pytest.raises(WorkerLostError, match="stopped"):
        await backend.receive()
    await backend.start(2)
    await backend.submit(first_plan(3, num_tokens=3))
    assert (await backend.receive()).step_id == 3
    await backend.stop()


def test_copies_through_staging_memory_carry_content_and_only_that() -> None:
    memory = StagingMemory.create(4, 64)
    first, second = worker(window=4, staging=memory), worker(window=4, staging=memory)
    first.run(
        plan(1, row(1, 0, 6, fa=edits(0, 1), swa=edits(2, 3)), new=(new_row(1, PROMPT),)),
    )
    out = (StagedBlock(pool="fa", block_id=0, slot=1), StagedBlock(pool="swa", block_id=2, slot=3))
    first.copy_staged(CopyToStaging(pool_epoch=1, copy_id=1, blocks=out))
    back = (StagedBlock(pool="fa", block_id=5, slot=1), StagedBlock(pool="swa", block_id=6, slot=3))
    done = second.copy_staged(CopyFromStaging(pool_epoch=4, copy_id=2, blocks=back))
    assert done == StagingCopied(pool_epoch=4, copy_id=2)
    loaded = row(1, 4, 2, fa=edits(5, 4), swa=edits(6, 4))
    assert second.run(plan(1, loaded, new=(new_row(1, PROMPT),))).results[0].error is None
    with pytest.raises(InvariantViolated, match="does not hold the KV"):
        second.run(plan(2, row(2, 4, 2, fa=edits(5, 3), swa=edits(6, 3)), new=(new_row(2, (9,) * 6),)))
    with pytest.raises(InvariantViolated, match="outside the pool"):
        second.copy_staged(
            CopyToStaging(pool_epoch=4, copy_id=3, blocks=(StagedBlock(pool="fa", block_id=8, slot=0),))
        )
    with pytest.raises(InvariantViolated, match="without staging memory"):
        worker().copy_staged(CopyToStaging(pool_epoch=1, copy_id=1, blocks=out[:1]))


def test_copies_take_their_turn_among_steps() -> None:
    async def main() -> None:
        memory = StagingMemory.create(4, 64)
        cost = LinearStepCost(fixed_s=1, per_token_s=0, per_attended_token_s=0)
        backend = SimulatedBackend(
            lambda: worker(staging=memory), cost=cost, start_time_s=5, copy_s_per_block=0.25
        )
        await backend.start(1)
        await backend.submit(first_plan(1, num_tokens=3))
        out = (StagedBlock(pool="fa", block_id=1, slot=0),)
        await backend.submit(CopyToStaging(pool_epoch=1, copy_id=9, blocks=out))
        await backend.submit(next_plan(2, 1, 3))
        answers = [(await backend.receive(), trio.current_time()) for _ in range(3)]
        assert [(type(answer).__name__, at) for answer, at in answers] == [
            ("StepDone", 6),
            ("StagingCopied", 6.25),
            ("StepDone", 7.25),
        ]

    trio.run(main, clock=VirtualClock())


async def test_inline_backend_copies() -> None:
    memory = StagingMemory.create(4, 64)
    backend = InlineBackend(lambda: (worker(staging=memory), WorkerInfo(device="inline")))
    await backend.start(1)
    await backend.submit(first_plan(1, num_tokens=3))
    out = (StagedBlock(pool="fa", block_id=1, slot=0),)
    await backend.submit(CopyToStaging(pool_epoch=1, copy_id=9, blocks=out))
    await backend.receive()
    assert await backend.receive() == StagingCopied(pool_epoch=1, copy_id=9)
    assert bytes(memory.slot(0, 8)) != bytes(8)
