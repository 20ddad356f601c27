from collections.abc import Awaitable, Callable

import pytest
import trio

from ksana.actors.device_executor import (
    MAX_FAILED_STARTS,
    MAX_RESTARTS,
    SLOW_RETRY_S,
    DeviceExecutor,
)
from ksana.devices.backend import WorkerLostError
from ksana.devices.simulated import Fault, SimulatedBackend, StartFault, crash_at_steps
from ksana.devices.simulated_worker import SimulatedWorker, hashed_tokens
from ksana.devices.staging import StagingMemory
from ksana.errors import InvariantViolated
from ksana.messages.base import Message
from ksana.messages.blocks import BlockTableEdit
from ksana.messages.requests import SamplingParams
from ksana.messages.staging import CopyFromStaging, CopyToStaging, StagedBlock, StagingCopied
from ksana.messages.steps import NewRow, Row, StepDone, StepPlan, WorkerLost, WorkerReady
from ksana.runtime.mailbox import Mailbox
from ksana.runtime.virtual_clock import VirtualClock


def plan(step_id: int, epoch: int) -> StepPlan:
    new = NewRow(
        request_id=step_id, prompt_len=1, token_ids=(5,), sampling=SamplingParams(seed=1, max_tokens=4)
    )
    edit = BlockTableEdit(index=0, block_id=step_id % 8)
    rows = (Row(request_id=step_id, start=0, num_tokens=1, sample=True, fa_write_start=0, fa_edits=(edit,)),)
    return StepPlan(pool_epoch=epoch, step_id=step_id, rows=rows, new=(new,))


class Bench:
    """An executor, its mailbox, and all it says with the time."""

    def __init__(self, fault: Fault | None = None, start_fault: StartFault | None = None) -> None:
        self.backend = SimulatedBackend(
            lambda: SimulatedWorker(
                hashed_tokens(100), block_size=4, num_fa_blocks=8, staging=StagingMemory.create(4, 64)
            ),
            fault=fault,
            start_fault=start_fault,
            start_time_s=1,
        )
        self.mailbox: Mailbox[Message] = Mailbox("executor", 100)
        self.said: list[tuple[float, Message]] = []
        self.heard = trio.Event()
        self.taps = 0
        self.copied: list[Message] = []
        self.executor = DeviceExecutor(
            self.backend,
            self.mailbox,
            scheduler=self._hear,
            step_timeout_s=50,
            remote_cache_loader=self.copied.append,
            tap=self._count,
        )

    def _hear(self, message: Message) -> None:
        self.said.append((trio.current_time(), message))
        self.heard.set()

    def _count(self, *_args: object) -> None:
        self.taps += 1

    async def next(self, kind: type[Message]) -> Message:
        """Wait until the executor says something; it must be this kind."""
        while not self.said:
            self.heard = trio.Event()
            await self.heard.wait()
        _, message = self.said.pop(0)
        assert isinstance(message, kind), message
        return message


def run(bench: Callable[[], Bench], script: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        b = bench()
        await b.executor.start_first()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(b.executor.run)
            await script(b)
            nursery.cancel_scope.cancel()
        await b.executor.stop()
        assert b.taps > 0

    trio.run(main, clock=VirtualClock())


def test_plans_go_in_and_answers_come_out() -> None:
    async def script(b: Bench) -> None:
        assert await b.next(WorkerReady) == WorkerReady(pool_epoch=1)
        b.mailbox.put(plan(1, 1))
        b.mailbox.put(plan(2, 1))
        for step_id in (1, 2):
            done = await b.next(StepDone)
            assert isinstance(done, StepDone)
            assert (done.step_id, done.pool_epoch) == (step_id, 1)
        assert b.executor.state == "ready"

    run(Bench, script)


def test_a_lost_worker_is_replaced_in_a_new_epoch_and_old_plans_are_dropped() -> None:
    async def script(b: Bench) -> None:
        await b.next(WorkerReady)
        b.mailbox.put(plan(1, 1))
        b.mailbox.put(plan(2, 1))
        lost = await b.next(WorkerLost)
        assert isinstance(lost, WorkerLost)
        assert (lost.pool_epoch, lost.restarting) == (1, True)
        assert "planned for step 1" in lost.reason
        b.mailbox.put(plan(3, 1))  # said before the scheduler heard of it
        assert await b.next(WorkerReady) == WorkerReady(pool_epoch=2)
        b.mailbox.put(plan(4, 2))
        done = await b.next(StepDone)
        assert isinstance(done, StepDone)
        assert (done.step_id, done.pool_epoch) == (4, 2)
        await trio.sleep(100)
        assert b.said == []

    run(lambda: Bench(fault=crash_at_steps(1)), script)


def test_it_gives_up_after_too_many_restarts_and_goes_on_slowly() -> None:
    async def script(b: Bench) -> None:
        for epoch in range(1, MAX_RESTARTS + 1):
            assert await b.next(WorkerReady) == WorkerReady(pool_epoch=epoch)
            b.mailbox.put(plan(epoch, epoch))
            lost = await b.next(WorkerLost)
            assert isinstance(lost, WorkerLost)
            assert lost.restarting
        await b.next(WorkerReady)
        b.mailbox.put(plan(100, MAX_RESTARTS + 1))
        lost = await b.next(WorkerLost)
        assert isinstance(lost, WorkerLost)
        assert not lost.restarting
        assert b.executor.state == "given_up"
        given_up_s = trio.current_time()
        await b.next(WorkerReady)
        assert trio.current_time() == pytest.approx(given_up_s + SLOW_RETRY_S + 1)
        assert b.executor.state == "ready"
        b.mailbox.put(plan(101, MAX_RESTARTS + 2))
        await b.next(StepDone)

    crashes = crash_at_steps(*range(1, MAX_RESTARTS + 2))
    run(lambda: Bench(fault=crashes), script)


def test_a_good_step_forgives_earlier_crashes() -> None:
    async def script(b: Bench) -> None:
        for epoch in range(1, 20):
            await b.next(WorkerReady)
            b.mailbox.put(plan(1, epoch))
            await b.next(StepDone)
            b.mailbox.put(plan(2, epoch))
            lost = await b.next(WorkerLost)
            assert isinstance(lost, WorkerLost)
            assert lost.restarting

    run(lambda: Bench(fault=lambda number, _plan: "even" if number % 2 == 0 else None), script)


def test_starts_that_fail_are_tried_again_and_told_when_hopeless() -> None:
    async def script(b: Bench) -> None:
        await b.next(WorkerReady)
        b.backend.kill()
        said = [await b.next(WorkerLost) for _ in range(MAX_FAILED_STARTS + 1)]
        restarting = [m.restarting for m in said if isinstance(m, WorkerLost)]
        assert restarting == [True] * MAX_FAILED_STARTS + [False]
        await trio.sleep(10 * SLOW_RETRY_S)
        assert b.executor.state == "given_up"
        assert b.backend.num_starts < 20

    run(lambda: Bench(start_fault=lambda epoch: None if epoch == 1 else "no memory"), script)


def test_a_worker_that_never_answers_is_replaced() -> None:
    async def script(b: Bench) -> None:
        await b.next(WorkerReady)
        await trio.sleep(1000)  # doing nothing with nothing to do is no crime
        assert b.said == []
        began_s = trio.current_time()
        b.mailbox.put(plan(1, 1))
        lost = await b.next(WorkerLost)
        assert isinstance(lost, WorkerLost)
        assert "no step was done in 50 s" in lost.reason
        assert trio.current_time() == pytest.approx(began_s + 50)
        assert await b.next(WorkerReady) == WorkerReady(pool_epoch=2)

    class Frozen:
        def seconds(self, _shape: object) -> float:
            return 1e9

    def bench() -> Bench:
        b = Bench()
        b.backend._cost = Frozen()
        return b

    run(bench, script)


def test_a_worker_not_trusted_any_more_is_replaced_at_the_next_generation() -> None:
    async def main() -> None:
        b = Bench()
        await b.executor.start_first()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(b.executor.run)
            await b.next(WorkerReady)
            nursery.cancel_scope.cancel()
        b.executor.forget_worker()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(b.executor.run)
            assert await b.next(WorkerReady) == WorkerReady(pool_epoch=2)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=VirtualClock())


def test_it_ends_when_its_mailbox_is_closed() -> None:
    async def main() -> None:
        b = Bench()
        await b.executor.start_first()
        b.mailbox.put(plan(1, 1))
        b.mailbox.close()
        await b.executor.run()

    trio.run(main, clock=VirtualClock())


def test_the_first_start_does_not_retry() -> None:
    async def main() -> None:
        b = Bench(start_fault=lambda _epoch: "no memory")
        with pytest.raises(WorkerLostError, match="no memory"):
            await b.executor.start_first()
        assert b.backend.num_starts == 1

    trio.run(main, clock=VirtualClock())


def test_copies_go_to_the_worker_and_their_answers_to_the_loader() -> None:
    async def script(b: Bench) -> None:
        await b.next(WorkerReady)
        out = (StagedBlock(pool="fa", block_id=1, slot=0),)
        b.mailbox.put(CopyToStaging(pool_epoch=0, copy_id=1, blocks=out))  # of an epoch that is over
        b.mailbox.put(plan(1, 1))
        b.mailbox.put(CopyToStaging(pool_epoch=1, copy_id=2, blocks=out))
        b.mailbox.put(CopyFromStaging(pool_epoch=1, copy_id=3, blocks=out))
        await b.next(StepDone)
        await trio.sleep(100)
        assert b.said == []
        assert b.copied == [StagingCopied(pool_epoch=1, copy_id=2), StagingCopied(pool_epoch=1, copy_id=3)]

    run(Bench, script)


def test_a_worker_that_hangs_in_a_copy_is_replaced() -> None:
    async def script(b: Bench) -> None:
        await b.next(WorkerReady)
        b.backend._copy_s_per_block = 1e9
        began_s = trio.current_time()
        out = (StagedBlock(pool="fa", block_id=1, slot=0),)
        b.mailbox.put(CopyToStaging(pool_epoch=1, copy_id=2, blocks=out))
        await b.next(WorkerLost)
        assert trio.current_time() == pytest.approx(began_s + 50)
        assert await b.next(WorkerReady) == WorkerReady(pool_epoch=2)
        assert b.copied == []

    run(Bench, script)


async def test_a_message_it_does_not_understand_is_a_bug() -> None:
    b = Bench()
    b.executor.state = "ready"
    await b.backend.start(1)
    b.mailbox.put(WorkerReady(pool_epoch=1))
    with pytest.RaisesGroup(pytest.RaisesExc(InvariantViolated, match="WorkerReady")):
        await b.executor.run()
