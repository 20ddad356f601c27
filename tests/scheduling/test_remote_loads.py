"""Remote loading as the scheduler sees it; allocator, executor and loader say whatever the test wants."""

from __future__ import annotations

from typing import Literal

import pytest

from ksana.messages.base import Message
from ksana.messages.blocks import (
    BlocksGranted,
    BlocksPlanned,
    BlocksRefused,
    CacheCounters,
    PlanBlocks,
    PoolUse,
    ResetPools,
)
from ksana.messages.outputs import Aborted, Failed, Outcome, StepOutputs, Usage
from ksana.messages.remote import CancelLoad, LoadOutcome, LoadPrefix, PrefixLoaded
from ksana.messages.requests import Abort, AddRequest, Drain, SamplingParams
from ksana.messages.steps import RowResult, StepDone, StepPlan, StepTimes, WorkerLost, WorkerReady
from ksana.scheduling.remote_loads import RETRY_HELD_AFTER_S, STEPS_BEFORE_RETRY
from ksana.scheduling.scheduler import Scheduler
from ksana.scheduling.settings import SchedulerSettings

BLOCK = 4
TIMES = StepTimes(prepare_ns=0, forward_ns=1_000_000, sample_ns=0)


class Desk:
    """A scheduler and what it said. The worker is ready; the pool has 100 blocks of 4 tokens."""

    def __init__(self, max_remote_loads: int = 4, max_num_seqs: int = 8) -> None:
        self.scheduler = Scheduler(
            SchedulerSettings(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=256,
                max_model_len=200,
                block_size=BLOCK,
                max_remote_loads=max_remote_loads,
                remote_load_timeout_s=5.0,
            )
        )
        self.now_s = 0.0
        self.said: list[Message] = []
        self.starts: dict[int, int] = {}
        """Where grants of new requests start, when not at 0."""
        self.num_held = 0
        self.tell(WorkerReady(pool_epoch=1))

    def tell(self, *messages: Message) -> None:
        for _, message in self.scheduler.handle(self.now_s, messages):
            self.said.append(message)

    def add(self, *request_ids: int, prompt_len: int = 12, max_tokens: int = 20, **more: float) -> None:
        for request_id in request_ids:
            self.tell(
                AddRequest(
                    request_id=request_id,
                    prompt_token_ids=tuple(range(prompt_len)),
                    sampling=SamplingParams(seed=0, max_tokens=max_tokens),
                    eos_token_ids=(),
                    arrival_time_s=self.now_s,
                    deadline_s=more.get("deadline_s", 1e9),
                )
            )

    def loaded(
        self, request_id: int, outcome: LoadOutcome = "loaded", holds: bool | None = None, epoch: int = 1
    ) -> None:
        holds = outcome in ("loaded", "partial") if holds is None else holds
        self.tell(
            PrefixLoaded(
                pool_epoch=epoch,
                request_id=request_id,
                outcome=outcome,
                holds_blocks=holds,
                num_cached_tokens=8 if holds else 0,
                num_remote_tokens=8 if holds else 0,
            )
        )

    def answer(self, **refused: Literal["no_room", "never", "behind"]) -> None:
        """Grant all that the last plan asks for, but these, written `r3="no_room"`."""
        plan = self.plans[-1]
        grants, refusals = [], []
        for demand in plan.demands:
            reason = refused.get(f"r{demand.request_id}")
            if reason is not None:
                refusals.append(BlocksRefused(request_id=demand.request_id, reason=reason))
                continue
            start = demand.num_computed_tokens
            if demand.new is not None:
                start = self.starts.get(demand.request_id, 0)
            grants.append(
                BlocksGranted(
                    request_id=demand.request_id,
                    start=start,
                    num_tokens=demand.num_tokens - (start if demand.new is not None else 0),
                    fa_write_start=start,
                )
            )
        use = PoolUse(
            num_blocks=100,
            num_free=100 - self.num_held,
            num_cached=0,
            num_referenced=0,
            num_deferred=0,
            num_held=self.num_held,
        )
        self.tell(
            BlocksPlanned(
                pool_epoch=plan.pool_epoch,
                step_id=plan.step_id,
                grants=tuple(grants),
                refusals=tuple(refusals),
                edits=(),
                copies=(),
                fa_use=use,
                swa_use=None,
                counters=CacheCounters(),
            )
        )

    def done(self, times: StepTimes = TIMES) -> None:
        """The oldest step that is not done yet."""
        step = next(s for s in self.steps if s.step_id == self.scheduler._state.steps[0].step_id)
        self.tell(
            StepDone(
                pool_epoch=step.pool_epoch,
                step_id=step.step_id,
                results=tuple(
                    RowResult(request_id=row.request_id, token_ids=(9,) if row.sample else ())
                    for row in step.rows
                ),
                times=times,
            )
        )

    def of(self, kind: type[Message]) -> list[int]:
        """Ids of the requests that messages of a kind were about."""
        return [message.request_id for message in self.said if isinstance(message, kind)]  # type: ignore[attr-defined]

    @property
    def plans(self) -> list[PlanBlocks]:
        return [message for message in self.said if isinstance(message, PlanBlocks)]

    @property
    def steps(self) -> list[StepPlan]:
        return [message for message in self.said if isinstance(message, StepPlan)]

    def demanded(self) -> list[int]:
        return [demand.request_id for demand in self.plans[-1].demands] if self.plans else []

    def released(self) -> list[int]:
        return [release.request_id for plan in self.plans for release in plan.releases]

    def ending(self, request_id: int) -> tuple[Outcome, Usage] | None:
        for message in self.said:
            if isinstance(message, StepOutputs):
                for ended in message.ended:
                    if ended.request_id == request_id:
                        return ended.outcome, ended.usage
        return None

    def is_empty(self) -> bool:
        state = self.scheduler._state
        return not (state.requests or state.waiting or state.loading or state.running or state.leaving)


# Which requests are loaded


def test_a_request_is_loaded_first_and_demanded_afterwards() -> None:
    desk = Desk()
    desk.add(1, prompt_len=12, max_tokens=20)
    load = next(message for message in desk.said if isinstance(message, LoadPrefix))
    assert load == LoadPrefix(
        pool_epoch=1,
        request_id=1,
        token_ids=tuple(range(12)),
        cache_salt="",
        num_reserved_tokens=16,
        give_up_at_s=5.0,
        prefill_tokens_per_s=0.0,
    )
    assert not desk.plans
    assert desk.scheduler.status().num_loading == desk.scheduler.status().num_waiting == 1
    assert desk.scheduler.status().has_work
    desk.starts[1] = 8
    desk.loaded(1)
    (demand,) = desk.plans[-1].demands
    assert (demand.request_id, demand.num_computed_tokens, demand.num_tokens) == (1, 0, 12)
    assert demand.new is not None
    desk.answer()
    assert [(row.start, row.num_tokens) for row in desk.steps[-1].rows] == [(8, 4)]
    status = desk.scheduler.status()
    assert status.counters.num_cached_tokens == 8
    assert status.load_outcomes == {"loaded": 1}
    assert desk.of(LoadPrefix) == [1]


def test_without_a_remote_cache_nobody_is_asked() -> None:
    desk = Desk(max_remote_loads=0)
    desk.add(1)
    desk.tell(WorkerLost(pool_epoch=1, reason="x", restarting=True))
    desk.tell(WorkerReady(pool_epoch=2))
    assert not desk.of(LoadPrefix)
    assert sum(isinstance(message, ResetPools) for message in desk.said) == 2  # to the allocator only
    assert desk.demanded() == [1]


@pytest.mark.parametrize(("prompt_len", "is_loaded"), [(1, False), (4, False), (5, True)])
def test_only_prompts_with_a_full_block_before_their_last_token(prompt_len: int, is_loaded: bool) -> None:
    desk = Desk()
    desk.add(1, prompt_len=prompt_len)
    assert desk.of(LoadPrefix) == [1] * is_loaded


def test_a_prompt_that_is_computed_in_no_time_is_not_looked_up() -> None:
    desk = Desk()
    desk.add(1, prompt_len=40)
    desk.loaded(1, "nothing")
    desk.answer()
    desk.done(StepTimes(prepare_ns=0, forward_ns=1_000_000, sample_ns=0))  # 40,000 tokens a second
    assert desk.scheduler.status().prefill_tokens_per_s == pytest.approx(40_000)
    desk.add(2, prompt_len=190)
    desk.add(3, prompt_len=199)
    assert desk.of(LoadPrefix) == [1]  # 200 tokens would take 5 ms
    desk = Desk()
    desk.scheduler._state.prefill_tokens_per_s = 1000.0
    desk.add(1, prompt_len=12)
    assert desk.of(LoadPrefix) == [1]
    (load,) = (message for message in desk.said if isinstance(message, LoadPrefix))
    assert load.prefill_tokens_per_s == 1000.0


def test_speed_is_measured_on_steps_of_prefill_only() -> None:
    desk = Desk()
    desk.add(1, prompt_len=64)
    desk.loaded(1, "nothing")
    desk.answer()
    desk.done(StepTimes(prepare_ns=0, forward_ns=64_000_000, sample_ns=0))
    assert desk.scheduler.status().prefill_tokens_per_s == pytest.approx(1000)
    desk.answer()
    desk.done(StepTimes(prepare_ns=0, forward_ns=64_000_000, sample_ns=0))  # one decode
    assert desk.scheduler.status().prefill_tokens_per_s == pytest.approx(1000)
    desk.add(2, prompt_len=64)
    desk.loaded(2, "nothing")
    while len(desk.steps[-1].rows) < 2:
        desk.answer()
        if len(desk.steps[-1].rows) < 2:
            desk.done(StepTimes(prepare_ns=0, forward_ns=1, sample_ns=0))
    while desk.scheduler._state.steps[0].step_id != desk.steps[-1].step_id:
        desk.done(StepTimes(prepare_ns=0, forward_ns=1, sample_ns=0))
    desk.done(StepTimes(prepare_ns=0, forward_ns=32_500_000, sample_ns=0))  # 65 tokens, one of them a decode
    assert desk.scheduler.status().prefill_tokens_per_s == pytest.approx(1250)


def test_a_load_gives_up_at_the_deadline_of_its_request() -> None:
    desk = Desk()
    desk.now_s = 10.0
    desk.add(1, deadline_s=12.0)
    (load,) = (message for message in desk.said if isinstance(message, LoadPrefix))
    assert load.give_up_at_s == 12.0


def test_loads_and_holders_together_are_bounded_and_others_run_meanwhile() -> None:
    desk = Desk(max_remote_loads=2)
    desk.add(1, 2, 3)
    assert desk.of(LoadPrefix) == [1, 2]
    assert desk.demanded() == [3]
    desk.loaded(2)  # waits with its blocks, as the plan for 3 is open
    desk.add(4)
    assert desk.of(LoadPrefix) == [1, 2]
    desk.answer()
    assert [row.request_id for row in desk.steps[-1].rows] == [3]
    assert desk.demanded() == [3, 2, 4]
    desk.answer()
    desk.add(5)
    assert desk.of(LoadPrefix) == [1, 2, 5]
    assert 1 not in desk.demanded()


def test_not_further_down_the_queue_than_may_soon_run() -> None:
    desk = Desk(max_remote_loads=2, max_num_seqs=1)
    desk.add(1, prompt_len=3)
    desk.answer()
    desk.add(2, prompt_len=3)
    desk.add(3, prompt_len=3)
    desk.add(4)
    assert not desk.of(LoadPrefix)  # 1 runs, 2 and 3 are next
    desk.tell(Abort(request_id=2))
    assert desk.of(LoadPrefix) == [4]


def test_loads_take_half_of_the_pool_at_most_but_the_first_may_take_more() -> None:
    desk = Desk()
    desk.add(1, prompt_len=3)
    desk.answer()  # now it knows that the pool has 400 tokens
    desk.add(2, prompt_len=150)
    desk.add(3, prompt_len=150)
    assert desk.of(LoadPrefix) == [2]
    desk.loaded(2)
    desk = Desk()
    desk.add(1, prompt_len=3)
    desk.answer()
    desk.add(2, prompt_len=90)
    desk.add(3, prompt_len=90)
    assert desk.of(LoadPrefix) == [2, 3]


def test_a_load_is_tried_once() -> None:
    desk = Desk()
    desk.add(1)
    desk.loaded(1, "nothing")
    desk.answer(r1="no_room")
    assert desk.of(LoadPrefix) == [1]


def test_one_that_found_no_room_is_tried_again_later_and_nobody_else_meanwhile() -> None:
    desk = Desk()
    desk.add(1, prompt_len=3, max_tokens=100)
    desk.answer()
    desk.add(2)
    desk.loaded(2, "no_room")
    desk.answer()
    desk.done()
    assert desk.demanded() == [1, 2]
    desk.answer(r2="no_room")
    desk.add(3)
    assert desk.of(LoadPrefix) == [2]
    for _ in range(STEPS_BEFORE_RETRY + 10):
        desk.done()
        if desk.of(LoadPrefix) != [2]:
            break
        desk.answer(r2="no_room", r3="behind")
    else:
        raise AssertionError("never tried again")
    assert desk.of(LoadPrefix)[:2] == [2, 2]
    desk.loaded(2)
    assert 2 in desk.demanded() or desk.scheduler._state.plan is not None


def test_loads_that_find_no_room_are_not_tried_again_while_no_step_is_done() -> None:
    desk = Desk(max_remote_loads=4)
    desk.add(1, prompt_len=3, max_tokens=100)
    desk.answer()
    desk.add(*range(2, 9))
    for _ in range(200):
        loading = desk.scheduler._state.loading
        if not loading:
            break
        desk.loaded(loading[0], "no_room")
    assert sorted(desk.of(LoadPrefix)) == list(range(2, 9))


def test_a_preempted_request_is_not_loaded_again() -> None:
    desk = Desk()
    desk.add(1, 2)
    desk.loaded(1)
    desk.loaded(2)
    desk.answer()
    while desk.demanded() != [1, 2]:
        desk.answer()
    desk.answer(r1="no_room", r2="no_room")
    while desk.scheduler._state.steps:
        desk.done()
    assert desk.released() == [2]
    desk.answer()
    assert desk.of(LoadPrefix) == [1, 2]


# Ends while loading


@pytest.mark.parametrize("how", ["abort", "deadline", "drain"])
@pytest.mark.parametrize("holds", [True, False])
def test_a_request_that_ends_while_loading(how: str, holds: bool) -> None:
    desk = Desk()
    desk.add(1, deadline_s=3.0)
    if how == "abort":
        desk.tell(Abort(request_id=1))
    elif how == "drain":
        desk.tell(Drain())
    else:
        assert desk.scheduler.next_timer_s() == 3.0
        desk.now_s = 3.0
        desk.tell()
    ending = desk.ending(1)
    assert ending is not None
    assert isinstance(ending[0], Aborted if how == "abort" else Failed)
    assert desk.of(CancelLoad) == [1]
    assert not desk.is_empty()  # the loader still owns what it holds
    assert not desk.plans
    desk.loaded(1, "loaded" if holds else "cancelled")
    assert desk.is_empty()
    assert desk.released() == [1] * holds
    desk.answer() if holds else None
    desk.loaded(1)
    assert desk.scheduler.status().counters.num_late_messages == 1


def test_aborts_of_a_holder() -> None:
    desk = Desk()
    desk.add(1, 2)
    desk.loaded(1)  # asked for
    desk.loaded(2)  # waits for the plan
    desk.tell(Abort(request_id=2), Abort(request_id=1))
    desk.answer(r1="no_room")
    assert desk.is_empty()
    assert sorted(desk.released()) == [1, 2]
    assert not desk.of(CancelLoad)
    desk.answer()
    assert not desk.steps


# Making room


def test_holders_behind_the_head_give_way_newest_first_then_loads() -> None:
    desk = Desk()
    desk.add(1, prompt_len=3)
    desk.add(2, 3, 4, 5)
    desk.loaded(2, "nothing")
    desk.loaded(3)
    desk.loaded(4)
    desk.answer()
    assert desk.demanded() == [1, 2, 3, 4]
    desk.answer(r2="no_room", r3="behind", r4="behind")
    desk.done()
    assert desk.released() == [4]
    assert not desk.of(CancelLoad)
    desk.answer(r2="no_room", r3="behind", r4="behind")
    desk.done()
    assert desk.released() == [4, 3]
    assert not desk.of(CancelLoad)
    desk.answer(r2="no_room", r3="behind", r4="behind")
    assert desk.of(CancelLoad) == [5]
    desk.loaded(5, "loaded")  # it was done before it heard: what it has is not kept
    desk.done()
    assert desk.released() == [4, 3, 5]
    assert desk.of(LoadPrefix) == [2, 3, 4, 5]


def test_a_running_request_goes_before_all_that_do_not_run() -> None:
    desk = Desk()
    desk.add(1, 2, 3)
    desk.loaded(1, "not_worth_it")
    desk.answer()
    desk.loaded(2)
    desk.answer(r1="no_room", r2="behind")  # stale: nothing is concluded
    assert desk.demanded() == [1, 2]
    desk.answer(r1="no_room", r2="behind")
    assert desk.released() == [2]
    desk.answer(r1="no_room", r2="behind")
    assert desk.of(CancelLoad) == [3]
    desk.done()
    desk.answer(r1="no_room", r2="behind")
    assert desk.of(CancelLoad) == [3]  # wait for it; nobody fails
    desk.loaded(3, "cancelled")
    desk.answer()
    assert desk.ending(1) is None
    assert desk.scheduler.status().counters.num_preemptions == 0


def test_nobody_gives_way_to_one_behind() -> None:
    desk = Desk()
    desk.add(1, 2)
    desk.loaded(2, "nothing")
    desk.answer(r2="no_room")
    assert not desk.of(CancelLoad)
    assert desk.ending(2) is None  # 1 may hold what it needs
    desk.loaded(1)
    assert desk.demanded() == [1, 2]


def test_the_head_itself_gives_up_its_blocks_before_it_fails() -> None:
    desk = Desk()
    desk.add(1)
    desk.loaded(1)
    desk.answer(r1="no_room")
    assert desk.released() == [1]
    assert desk.demanded() == [1]
    desk.answer(r1="no_room")
    ending = desk.ending(1)
    assert ending is not None
    assert isinstance(ending[0], Failed)
    assert ending[0].code == "context_length_exceeded"
    assert desk.is_empty()


def test_never_ends_a_holder_and_gives_its_blocks_back() -> None:
    desk = Desk()
    desk.add(1)
    desk.loaded(1)
    desk.answer(r1="never")
    assert desk.ending(1) is not None
    assert desk.released() == [1]


def test_blocks_held_for_write_back_are_waited_for() -> None:
    desk = Desk()
    desk.num_held = 90
    desk.add(1)
    desk.loaded(1, "nothing")
    desk.answer(r1="no_room")
    assert desk.ending(1) is None
    assert desk.scheduler.next_timer_s() == RETRY_HELD_AFTER_S
    num_plans = len(desk.plans)
    desk.now_s = RETRY_HELD_AFTER_S
    desk.tell()
    assert len(desk.plans) == num_plans + 1
    desk.num_held = 0
    desk.answer()
    assert [row.request_id for row in desk.steps[-1].rows] == [1]
    assert desk.scheduler.next_timer_s() == 1e9


# The worker is lost


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_a_lost_worker_makes_loads_void(when: str) -> None:
    desk = Desk()
    desk.add(1, 2)
    desk.loaded(2)
    desk.tell(Abort(request_id=2))
    if when == "before":
        desk.loaded(1)
    desk.tell(WorkerLost(pool_epoch=1, reason="killed", restarting=True))
    if when == "between":
        desk.loaded(1)
    assert desk.scheduler.status().num_waiting == 1
    assert desk.scheduler.status().num_loading == 0
    desk.tell(WorkerReady(pool_epoch=2))
    resets = [message for message in desk.said if isinstance(message, ResetPools)]
    assert [message.pool_epoch for message in resets] == [1, 1, 2, 2]
    assert desk.of(LoadPrefix) == [
        1,
        2,
        1,
    ]  # the pools are empty: what the store has is worth more than before
    if when == "after":
        desk.loaded(1, "loaded", epoch=1)
        assert desk.scheduler.status().num_loading == 1
    num_plans = len(desk.plans)
    desk.loaded(1, "loaded", epoch=2)
    assert len(desk.plans) == num_plans + 1
    assert desk.released() == []  # 2 went with the pools
    assert desk.scheduler.status().counters.num_late_messages == (when != "before")


def test_a_worker_that_is_given_up_fails_loading_requests() -> None:
    desk = Desk()
    desk.add(1)
    desk.tell(WorkerLost(pool_epoch=1, reason="killed", restarting=False))
    ending = desk.ending(1)
    assert ending is not None
    assert isinstance(ending[0], Failed)
    assert ending[0].status == 503
    desk.loaded(1)
    assert desk.is_empty()


def test_the_state_survives_a_snapshot() -> None:
    desk = Desk()
    desk.add(1, 2)
    desk.loaded(1)
    desk.scheduler.restore(desk.scheduler.snapshot())
    desk.loaded(2)
    desk.answer()
    assert desk.demanded() == [1, 2]
