"""The lean executor and the fast worker do the same at the same times as those that check everything."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio

from ksana.costs.step_cost import LinearStepCost
from ksana.devices.simulated import crash_at_steps
from ksana.devices.simulated_worker import KnownRequest
from ksana.errors import InvariantViolated
from ksana.messages.outputs import Failed, Finished, StepOutputs
from ksana.messages.requests import AddRequest, SamplingParams
from ksana.messages.steps import StepPlan
from ksana.runtime.deterministic import run_deterministic
from ksana.runtime.virtual_clock import VirtualClock
from ksana.stores.simulated import SimulatedStore
from simulations.engine import EngineSpec, SimulatedEngine
from simulations.executor import LeanExecutor

Seen = tuple[float, int, object]
SPEC = EngineSpec(
    block_size=4,
    num_fa_blocks=40,
    num_swa_blocks=40,
    sliding_window=8,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    step_timeout_s=30.0,
    num_staging_slots=8,
)


def token(request: KnownRequest, position: int) -> int | str:
    if request.sampling.seed == 5 and position == 3:
        return "NaN in the logits"
    return request.token_ids[0] + request.sampling.seed + position


class Story:
    """Eight requests to one engine, two with a common prefix, one that has an error, and what befalls it."""

    def __init__(self, *, fast: bool, with_store: bool = False, **kinds: object) -> None:
        self.fast = fast
        self.with_store = with_store
        self.kinds = kinds
        self.seen: list[Seen] = []
        self.restarts = 0
        self.num_steps = 0

    def listen(self, outputs: StepOutputs) -> None:
        now = trio.current_time()
        self.seen += [(now, some.request_id, some.token_ids) for some in outputs.tokens]
        self.seen += [(now, end.request_id, end.outcome) for end in outputs.ended]

    def run(self, befall: Callable[[SimulatedEngine], None] | None = None) -> Story:
        async def main() -> None:
            clock = VirtualClock.current()
            store = SimulatedStore(0, latency_s=0.001, bytes_per_s=1e6) if self.with_store else None
            engine = SimulatedEngine(
                SPEC,
                cost=LinearStepCost(fixed_s=1.0, per_token_s=0.01, per_attended_token_s=0.0),
                tokens=token,
                listener=self.listen,
                store=store,
                fast=self.fast,
                host_s=0.125,
                **self.kinds,  # type: ignore[arg-type]
            )
            assert isinstance(engine.executor, LeanExecutor) == self.fast
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.run)
                for number in range(1, 9):
                    prompt = tuple(range(100 * (number // 2), 100 * (number // 2) + 13 + number))
                    add = AddRequest(
                        request_id=number,
                        prompt_token_ids=prompt,
                        sampling=SamplingParams(seed=number, max_tokens=4 * number),
                        eos_token_ids=(),
                        arrival_time_s=0,
                        deadline_s=1e5,
                    )
                    clock.call_at(7 * number, lambda add=add: engine.add(add))  # type: ignore[misc]
                clock.call_at(40.5, lambda: engine.abort(4))
                if befall is not None:
                    befall(engine)
                await trio.sleep(5000)
                nursery.cancel_scope.cancel()
            assert engine.num_open == 0
            self.restarts = engine.executor.num_restarts
            self.num_steps = engine.backend.num_steps_begun

        run_deterministic(3, main, VirtualClock())
        return self


def told(befall: Callable[[SimulatedEngine], None] | None = None, **kinds: object) -> Story:
    """What both executors tell, which is the same."""
    full, lean = (Story(fast=fast, **kinds).run(befall) for fast in (False, True))  # type: ignore[arg-type]
    assert sorted(map(repr, lean.seen)) == sorted(map(repr, full.seen))
    assert (lean.restarts, lean.num_steps) == (full.restarts, full.num_steps)
    return lean


@pytest.mark.parametrize("with_store", [False, True])
def test_steps_take_the_same_time(with_store: bool) -> None:
    story = told(with_store=with_store)
    endings = {number: outcome for _, number, outcome in story.seen if not isinstance(outcome, tuple)}
    assert len(endings) == 8
    assert isinstance(endings[8], Finished)
    assert isinstance(endings[5], Failed)
    assert story.restarts == 0


def test_a_fast_run_is_the_same_every_time() -> None:
    first, second = (Story(fast=True, fault=crash_at_steps(7)).run() for _ in range(2))
    assert first.seen == second.seen


def test_a_planned_crash_comes_at_the_end_of_its_step() -> None:
    assert told(fault=crash_at_steps(5, 20)).restarts == 2


def test_a_crash_is_noticed_at_once() -> None:
    def befall(engine: SimulatedEngine) -> None:
        for at_s in (20.25, 31.0, 4000.0):  # within steps, and when idle
            VirtualClock.current().call_at(at_s, lambda: engine.crash_worker("hit"))

    assert told(befall).restarts == 3


def test_a_worker_that_fails_to_start_is_tried_again() -> None:
    fails = {2: "no luck", 3: "no luck"}
    assert told(fault=crash_at_steps(3), start_fault=fails.get).restarts == 3


def test_slow_steps_are_slow_and_too_slow_ones_cost_the_worker() -> None:
    def befall(engine: SimulatedEngine) -> None:
        clock = VirtualClock.current()
        clock.call_at(15, lambda: engine.slow_worker(3))
        clock.call_at(40, lambda: engine.slow_worker(100))
        clock.call_at(45, lambda: engine.slow_worker(1))

    story = told(befall)
    assert story.restarts == 1
    assert story.seen != told().seen


def test_what_a_step_raises_comes_out_of_the_engine() -> None:
    def broken(number: int, _plan: StepPlan) -> str | None:
        if number == 2:
            raise InvariantViolated("found by a step")
        return None

    for fast in (False, True):
        with pytest.raises(BaseExceptionGroup) as caught:
            Story(fast=fast, fault=broken).run()
        assert caught.group_contains(InvariantViolated, match="found by a step")


def test_a_decode_step_wakes_the_scheduler_once_and_nobody_else() -> None:
    """When the step is done. The next blocks are allocated, and the next plan is sent, within its turn."""

    class Count(trio.abc.Instrument):
        num_task_steps = 0

        def before_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002
            self.num_task_steps += 1

    async def main() -> tuple[int, int]:
        over, count = trio.Event(), Count()
        engine = SimulatedEngine(
            EngineSpec(),
            cost=LinearStepCost(),
            tokens=lambda _request, position: 3 + position,
            listener=lambda outputs: over.set() if outputs.ended else None,
            fast=True,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.run)
            await trio.sleep(5)
            trio.lowlevel.add_instrument(count)
            engine.add(
                AddRequest(
                    request_id=1,
                    prompt_token_ids=(1, 2, 3),
                    sampling=SamplingParams(seed=0, max_tokens=500),
                    eos_token_ids=(),
                    arrival_time_s=5,
                    deadline_s=1e5,
                )
            )
            await over.wait()
            nursery.cancel_scope.cancel()
        return count.num_task_steps, engine.status().counters.num_steps

    num_task_steps, num_steps = run_deterministic(0, main, VirtualClock())
    assert num_steps >= 500
    assert num_task_steps <= num_steps + 20
