"""What the scheduler makes of answers, with an allocator that says whatever the test wants."""

from __future__ import annotations

from typing import Literal

import pytest

from ksana.errors import InvariantViolated
from ksana.messages.base import Message
from ksana.messages.blocks import (
    BlockCopy,
    BlocksGranted,
    BlocksPlanned,
    BlocksRefused,
    BlockTableEdit,
    CacheCounters,
    PlanBlocks,
    PoolUse,
    TableEdits,
)
from ksana.messages.outputs import Failed, StepOutputs
from ksana.messages.requests import Abort, AddRequest, SamplingParams
from ksana.messages.steps import RowResult, StepDone, StepPlan, WorkerLost, WorkerReady
from ksana.scheduling.scheduler import Scheduler
from ksana.scheduling.settings import SchedulerSettings
from tests.scheduling.world import TIMES

USE = PoolUse(num_blocks=9, num_free=9, num_cached=0, num_referenced=0, num_deferred=0)
Reason = Literal["no_room", "budget", "behind", "never"]


class Desk:
    """A scheduler whose allocator and executor are the test. Prompts have 4 tokens; the block size is 4."""

    def __init__(
        self,
        num_requests: int,
        plan_ahead: bool = True,
        last_max_tokens: int = 50,
        hold_when_short: bool = False,
    ) -> None:
        self.scheduler = Scheduler(
            SchedulerSettings(
                max_num_seqs=8,
                max_num_batched_tokens=64,
                max_model_len=100,
                block_size=4,
                plan_ahead=plan_ahead,
                hold_when_short=hold_when_short,
            )
        )
        self.plans: list[PlanBlocks] = []
        self.steps: list[StepPlan] = []
        self.outputs: list[StepOutputs] = []
        for request_id in range(1, num_requests + 1):
            self.tell(
                AddRequest(
                    request_id=request_id,
                    prompt_token_ids=(5, 6, 7, 8),
                    sampling=SamplingParams(
                        seed=0, max_tokens=last_max_tokens if request_id == num_requests else 50
                    ),
                    eos_token_ids=(),
                    arrival_time_s=0.0,
                    deadline_s=1e9,
                )
            )
        self.tell(WorkerReady(pool_epoch=1))

    def tell(self, *messages: Message) -> None:
        for _, message in self.scheduler.handle(0.0, messages):
            if isinstance(message, PlanBlocks):
                self.plans.append(message)
            elif isinstance(message, StepPlan):
                self.steps.append(message)
            elif isinstance(message, StepOutputs):
                self.outputs.append(message)

    def answer(
        self,
        refused: dict[int, Reason] | None = None,
        edits: tuple[TableEdits, ...] = (),
        copies: tuple[BlockCopy, ...] = (),
    ) -> None:
        """Grant everything that is asked for, but these."""
        refused = refused or {}
        plan = self.plans[-1]
        grants = [
            BlocksGranted(
                request_id=demand.request_id,
                start=demand.num_computed_tokens,
                num_tokens=demand.num_tokens,
                fa_write_start=demand.num_computed_tokens,
            )
            for demand in plan.demands
            if demand.request_id not in refused
        ]
        self.tell(
            BlocksPlanned(
                pool_epoch=1,
                step_id=plan.step_id,
                grants=tuple(grants),
                refusals=self.refusals(refused),
                edits=edits,
                copies=copies,
                fa_use=USE,
                swa_use=None,
                counters=CacheCounters(),
            )
        )

    def refusals(self, refused: dict[int, Reason]) -> tuple[BlocksRefused, ...]:
        return tuple(
            BlocksRefused(request_id=demand.request_id, reason=refused[demand.request_id])
            for demand in self.plans[-1].demands
            if demand.request_id in refused
        )

    def done(self, step: StepPlan) -> None:
        self.tell(
            StepDone(
                pool_epoch=1,
                step_id=step.step_id,
                results=tuple(
                    RowResult(request_id=row.request_id, token_ids=(9,) if row.sample else ())
                    for row in step.rows
                ),
                times=TIMES,
            )
        )

    def demanded(self) -> list[int]:
        return [demand.request_id for demand in self.plans[-1].demands]

    def released(self) -> list[int]:
        return [release.request_id for release in self.plans[-1].releases]


EDIT = TableEdits(request_id=1, fa_edits=(BlockTableEdit(0, 7),))
COPY = BlockCopy(pool="fa", source=3, destination=4)


def test_edits_and_copies_of_a_plan_without_a_step_go_with_the_next() -> None:
    desk = Desk(1)
    desk.answer()
    desk.answer({1: "no_room"}, edits=(EDIT,), copies=(COPY,))
    assert len(desk.steps) == 1
    desk.done(desk.steps[0])
    desk.answer()
    assert desk.steps[1].edits == (EDIT,)
    assert desk.steps[1].copies == (COPY,)
    desk.answer()
    assert desk.steps[2].edits == ()


def test_edits_of_a_request_that_was_preempted_meanwhile_are_forgotten() -> None:
    desk = Desk(2)
    desk.answer()
    edit = TableEdits(request_id=2, fa_edits=(BlockTableEdit(0, 7),))
    desk.answer({1: "no_room", 2: "no_room"}, edits=(edit,))
    desk.done(desk.steps[0])  # now 2 has stepped aside, and asks for its first blocks again
    assert desk.released() == [2]
    assert desk.demanded() == [1, 2]
    desk.answer()
    assert [new.request_id for new in desk.steps[1].new] == [2]
    assert desk.steps[1].drop == (2,)
    assert desk.steps[1].edits == ()


def test_one_victim_at_a_time_and_only_when_no_step_names_it() -> None:
    desk = Desk(4)
    desk.answer()
    desk.answer({1: "no_room", 2: "no_room"})
    assert desk.scheduler.status().counters.num_preemptions == 1
    # 4 was granted a row, but stepped aside for 1 and 2; the first step still names it
    assert [row.request_id for row in desk.steps[1].rows] == [3]
    desk.done(desk.steps[0])
    assert desk.released() == [4]
    assert desk.demanded() == [1, 2, 3, 4]
    # only 3 runs now, and more is refused: its last step is not done yet either
    desk.answer({1: "no_room", 2: "no_room", 4: "behind"})
    assert desk.scheduler.status().counters.num_preemptions == 2
    assert len(desk.plans) == 3
    desk.done(desk.steps[1])
    assert desk.released() == [3]


def test_no_victim_while_blocks_are_on_their_way_back() -> None:
    desk = Desk(3)
    desk.answer()
    desk.tell(Abort(request_id=3))
    desk.answer({1: "no_room", 2: "no_room"})
    assert desk.scheduler.status().counters.num_preemptions == 0
    desk.done(desk.steps[0])
    assert desk.released() == [3]


def test_a_refused_plan_is_not_repeated_until_something_gave_way() -> None:
    desk = Desk(1)
    desk.answer()
    desk.answer({1: "no_room"})
    assert len(desk.plans) == 2
    desk.done(desk.steps[0])
    assert len(desk.plans) == 3


def test_without_room_not_asked_for_again_at_once_unless_nothing_runs() -> None:
    desk = Desk(2)
    desk.answer({2: "no_room"})
    assert desk.demanded() == [1]
    desk.tell(Abort(request_id=1))
    desk.answer()
    assert desk.demanded() == [2]


def test_asked_for_again_when_blocks_are_released() -> None:
    desk = Desk(3)
    desk.answer({3: "no_room"})
    desk.tell(Abort(request_id=2))
    desk.answer()
    desk.done(desk.steps[0])
    assert desk.released() == [2]
    assert desk.demanded() == [1, 3]


def test_what_was_to_be_released_in_a_former_epoch_is_not() -> None:
    desk = Desk(2, last_max_tokens=1)
    desk.answer()
    desk.done(desk.steps[0])  # 2 has ended, but the plan that is open was sent before
    assert len(desk.plans) == 2
    desk.tell(WorkerLost(pool_epoch=1, reason="killed", restarting=True), WorkerReady(pool_epoch=2))
    assert desk.plans[-1].pool_epoch == 2
    assert desk.released() == []
    assert desk.plans[-1].updates == ()
    assert desk.demanded() == [1]


def test_kv_of_a_row_in_error_does_not_become_cache() -> None:
    desk = Desk(1)
    desk.answer()
    desk.answer()
    for step, error in ((desk.steps[0], "not finite"), (desk.steps[1], None)):
        result = RowResult(request_id=1, error=error, token_ids=(9,) if error is None else ())
        desk.tell(StepDone(pool_epoch=1, step_id=step.step_id, results=(result,), times=TIMES))
    assert desk.released() == [1]
    assert desk.plans[-1].updates == ()


def test_a_refusal_overtaken_by_a_done_step_fails_nobody() -> None:
    desk = Desk(1)
    desk.answer()
    desk.done(desk.steps[0])
    desk.answer({1: "no_room"})  # asked for before the step was done: sliding blocks may be idle now
    assert not any(outputs.ended for outputs in desk.outputs)
    desk.answer({1: "no_room"})  # nothing in flight, nobody else: it can never run
    (ended,) = desk.outputs[-1].ended
    assert isinstance(ended.outcome, Failed)
    assert ended.outcome.status == 500
    assert ended.usage.num_output_tokens == 1


def test_refused_as_too_large_only_after_its_last_token_came() -> None:
    desk = Desk(2)
    desk.answer()
    desk.answer({1: "never"})
    assert not any(outputs.ended for outputs in desk.outputs)
    desk.done(desk.steps[0])
    desk.answer({1: "never"})
    assert [ended.request_id for ended in desk.outputs[-1].ended] == [1]
    assert desk.outputs[-1].ended[0].usage.num_output_tokens == 1


def test_a_grant_from_another_token_is_a_bug() -> None:
    desk = Desk(1)
    desk.answer()
    grant = BlocksGranted(request_id=1, start=0, num_tokens=1, fa_write_start=0)
    with pytest.raises(InvariantViolated, match="granted from token 0"):
        desk.tell(
            BlocksPlanned(
                pool_epoch=1,
                step_id=desk.plans[-1].step_id,
                grants=(grant,),
                refusals=(),
                edits=(),
                copies=(),
                fa_use=USE,
                swa_use=None,
                counters=CacheCounters(),
            )
        )


def test_a_sampling_row_without_a_token_fails_its_request() -> None:
    desk = Desk(1, plan_ahead=False)
    desk.answer()
    result = RowResult(request_id=1)
    desk.tell(StepDone(pool_epoch=1, step_id=desk.steps[0].step_id, results=(result,), times=TIMES))
    (ended,) = desk.outputs[-1].ended
    assert isinstance(ended.outcome, Failed)
    assert "0 tokens where one was due" in ended.outcome.message
    assert desk.released() == [1]


def test_results_that_do_not_match_the_rows_are_a_bug() -> None:
    desk = Desk(2)
    desk.answer()
    with pytest.raises(InvariantViolated, match="2 rows, but 0 results"):
        desk.tell(StepDone(pool_epoch=1, step_id=desk.steps[0].step_id, results=(), times=TIMES))


def test_steps_done_grow_and_exclude_those_in_flight() -> None:
    desk = Desk(1)
    desk.answer()
    desk.answer()
    desk.done(desk.steps[0])
    assert [plan.done_step_id for plan in desk.plans] == [0, 0, 1]
    assert [step.step_id for step in desk.steps] == [1, 2]
