"""What a round's times are made of, with a clock that says what the test wants."""

from __future__ import annotations

from collections.abc import Iterator

from ksana.messages.blocks import PlanBlocks
from ksana.messages.perf import AddInferRequest, InferBatchReady, InferRequest, RunInferRound
from ksana.messages.requests import SamplingParams
from ksana.messages.steps import (
    OperatorTime,
    Rehearsal,
    RowResult,
    StepDone,
    StepPlan,
    StepTimes,
    WorkerReady,
)
from ksana.perf.rounds import RoundTimer, TimedScheduler
from ksana.scheduling.fixed_batch import FixedBatchPolicy
from ksana.scheduling.settings import SchedulerSettings
from tests.scheduling.test_fixed_batch import World


def ask() -> PlanBlocks:
    return PlanBlocks(pool_epoch=1, step_id=1, done_step_id=0, token_budget=8)


def plan(step_id: int, **changes: object) -> StepPlan:
    rehearsal = Rehearsal(**changes)  # type: ignore[arg-type]
    return StepPlan(pool_epoch=1, step_id=step_id, rows=(), rehearsal=rehearsal)


def done(step_id: int, operators: tuple[OperatorTime, ...] = ()) -> StepDone:
    return StepDone(
        pool_epoch=1,
        step_id=step_id,
        results=(),
        times=StepTimes(prepare_ns=10, forward_ns=500, sample_ns=30),
        operators=operators,
    )


def test_the_parts_add_up_to_the_step() -> None:
    timer = RoundTimer()
    timer.activation(1000, 1020, [RunInferRound()], [("block_allocator", ask())])
    timer.activation(1100, 1150, [], [("executor", plan(1))])
    timer.activation(1900, 1925, [done(1)], [])
    sample = timer.rounds.popleft().sample
    assert sample.schedule_ns == 150
    assert sample.dispatch_ns == 1900 - 1150 - 540
    assert (sample.prepare_ns, sample.forward_ns, sample.sampling_ns) == (10, 500, 30)
    assert sample.update_ns == 25
    assert sample.step_ns == 925
    parts = [getattr(sample, name) for name in sample.__struct_fields__ if name != "step_ns"]
    assert sum(parts) == sample.step_ns
    assert not timer.rounds


def test_a_round_planned_ahead_begins_when_the_one_before_ends() -> None:
    timer = RoundTimer()
    timer.activation(0, 10, [], [("block_allocator", ask())])
    timer.activation(20, 30, [], [("executor", plan(1)), ("block_allocator", ask())])
    timer.activation(40, 50, [], [("executor", plan(2))])
    timer.activation(700, 720, [done(1)], [])
    timer.activation(1300, 1310, [done(2)], [])
    first, second = (measured.sample for measured in timer.rounds)
    assert first.step_ns == 720
    assert second.schedule_ns == 30
    assert second.step_ns == 1310 - 720
    assert second.dispatch_ns == 1300 - 720 - 540
    assert first.dispatch_ns == 700 - 30 - 540


def test_dry_steps_are_no_rounds_and_a_batch_begins_afresh() -> None:
    timer = RoundTimer()
    timer.activation(0, 10, [], [("block_allocator", ask())])
    timer.activation(20, 30, [], [("executor", plan(1, fill_seed=3))])
    timer.activation(40, 50, [done(1)], [])
    assert not timer.rounds
    timer.activation(60, 70, [], [("block_allocator", ask())])
    timer.activation(80, 90, [], [("executor", plan(2))])
    timer.forget()
    timer.activation(1000, 1010, [done(2)], [])
    assert not timer.rounds


def test_a_round_knows_how_it_was_run() -> None:
    timer = RoundTimer()
    operator = OperatorTime(name="rope", total_ns=7, num_calls=2)
    timer.activation(0, 10, [], [("block_allocator", ask())])
    timer.activation(20, 30, [], [("executor", plan(1, num_layer_rounds=4, trace_operators=True))])
    timer.activation(900, 910, [done(1, (operator,))], [])
    measured = timer.rounds.popleft()
    assert (measured.num_layer_rounds, measured.trace_operators) == (4, True)
    assert measured.operators == (operator,)
    assert measured.sample.forward_ns == 500


def test_results_that_come_at_once_are_taken_one_by_one() -> None:
    ticks: Iterator[int] = iter(range(0, 10**9, 10))
    timer = RoundTimer()
    world = World(plan_ahead=True)
    settings: SchedulerSettings = world.scheduler.settings
    world.scheduler = TimedScheduler(settings, FixedBatchPolicy(), timer, clock=lambda: next(ticks))
    world.tell(WorkerReady(pool_epoch=2))
    request = InferRequest(
        request_id=1, token_ids=(1, 2, 3), forwarding_token_num=1, sampling=SamplingParams(seed=1)
    )
    world.tell(AddInferRequest(requests=(request,), fill_seed=1))
    world.run()
    assert isinstance(world.ready[0], InferBatchReady)
    world.tell(RunInferRound(), RunInferRound())
    held = []
    while world._deliver("block_allocator") or world._deliver("scheduler"):
        held += world.inboxes["executor"]
        world.inboxes["executor"].clear()
    assert len(held) == 2
    results = tuple(RowResult(request_id=1, token_ids=(5,)) for _ in range(1))
    answers = [
        StepDone(
            pool_epoch=2,
            step_id=plan.step_id,
            results=results,
            times=StepTimes(prepare_ns=0, forward_ns=0, sample_ns=0),
        )
        for plan in held
        if isinstance(plan, StepPlan)
    ]
    world.tell(*answers)
    assert len(timer.rounds) == len(world.outputs) == 2
    assert all(outputs.tokens[0].token_ids == (5,) for outputs in world.outputs)
