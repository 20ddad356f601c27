"""The scheduler's rules, one by one, in a world with the real allocator and a worker that checks."""

from __future__ import annotations

import pytest

from ksana.errors import InvariantViolated
from ksana.messages.blocks import PlanBlocks, ResetPools
from ksana.messages.outputs import Aborted, Failed, Finished
from ksana.messages.requests import Abort, Drain, StopStringFound
from ksana.messages.steps import StepDone, StepPlan, WorkerLost, WorkerReady
from ksana.scheduling.scheduler import Scheduler
from ksana.scheduling.settings import SchedulerSettings
from tests.scheduling.world import BLOCK_SIZE, EOS, TIMES, World, scripted_token


def test_one_request_runs_to_its_limit() -> None:
    world = World()
    world.add(1, prompt_len=5, max_tokens=8)
    world.run()
    world.check_finished(1)
    world.check_quiet()
    # prefill with the first token, then seven decodes; none is computed beyond max_tokens
    assert [(row.start, row.num_tokens) for step in world.steps for row in step.rows] == [
        (0, 5),
        *((5 + i, 1) for i in range(7)),
    ]
    status = world.scheduler.status()
    assert status.counters.num_length == 1
    assert status.counters.num_ignored_rows == 0
    assert status.counters.num_generated_tokens == 8


def test_timing_and_usage_are_told_at_the_end() -> None:
    world = World()
    world.now_s = 1.0
    world.add(1, prompt_len=5, max_tokens=3)
    world.run()
    ended = world.ended[1]
    assert ended.usage.num_prompt_tokens == 5
    assert ended.usage.num_cached_tokens == 0
    timing = ended.timing
    assert timing is not None
    assert timing.arrival_s == 1.0
    assert timing.arrival_s < timing.first_scheduled_s < timing.first_token_s < timing.last_token_s


def test_next_step_is_planned_while_one_runs_and_never_more_than_two() -> None:
    world = World()
    world.add(1, max_tokens=10)
    most = 0
    while world.step():
        most = max(most, world.scheduler.status().num_steps_in_flight)
    assert most == 2
    world.check_finished(1)


def test_without_planning_ahead_one_step_at_a_time() -> None:
    world = World(plan_ahead=False)
    world.add(1, max_tokens=10)
    while world.step():
        assert world.scheduler.status().num_steps_in_flight <= 1
    world.check_finished(1)
    world.check_quiet()


def test_one_block_plan_is_open_at_most() -> None:
    world = World()
    world.add(1)
    for request_id in range(2, 6):
        world.add(request_id)
    plans = [m for m in world.inboxes["block_allocator"] if isinstance(m, PlanBlocks)]
    assert len(plans) <= 1


def test_row_planned_ahead_of_a_stop_is_dropped_and_its_blocks_kept_until_its_step_is_done() -> None:
    world = World()
    world.ends[1] = 2
    world.add(1, max_tokens=10)
    world.run_until(lambda: 1 in world.ended)
    # the step planned ahead still names it: no release may be on its way
    assert world.scheduler.status().num_steps_in_flight == 1
    assert not world.inboxes["block_allocator"]
    world.run()
    world.check_finished(1)
    world.check_quiet()
    assert world.scheduler.status().counters.num_ignored_rows == 1
    assert world.ended[1].usage.num_output_tokens == 3
    assert world.tokens[1][-1] == EOS


def test_a_grant_for_a_request_that_ended_meanwhile_is_not_run() -> None:
    world = World()
    world.ends[1] = 0
    world.add(1)
    world.add(2)
    world.run_until(lambda: len(world.steps) == 1)  # step 1 is sent, step 2 asked for
    assert world.inboxes["block_allocator"]
    world.deliver("executor")
    world.deliver("scheduler")  # step 1 is done; 1 ended while its blocks are being planned
    assert 1 in world.ended
    world.deliver("block_allocator")
    world.deliver("scheduler")
    assert [row.request_id for row in world.steps[1].rows] == [2]
    world.run()
    world.check_finished(2)
    world.check_quiet()


def test_prefill_is_cut_to_the_budget_and_decodes_go_first() -> None:
    world = World(max_num_batched_tokens=16)
    world.add(1, prompt_len=3, max_tokens=20)
    world.run_until(lambda: len(world.tokens.get(1, ())) >= 2)
    world.add(2, prompt_len=40, max_tokens=2)
    world.run()
    world.check_finished(1)
    world.check_finished(2)
    assert all(sum(row.num_tokens for row in step.rows) <= 16 for step in world.steps)
    chunks = [row for step in world.steps for row in step.rows if row.request_id == 2]
    assert [(row.start, row.num_tokens, row.sample) for row in chunks] == [
        (0, 15, False),
        (15, 15, False),
        (30, 10, True),
        (40, 1, True),
    ]
    mixed = [step for step in world.steps if len(step.rows) == 2]
    assert all(step.rows[0].request_id == 1 for step in mixed)


def test_waiting_requests_start_in_the_order_of_arrival() -> None:
    world = World(max_num_seqs=2, start=False)
    for request_id in (3, 1, 2, 5, 4):  # tokenizing took longer for some
        world.add(request_id, max_tokens=3)
    world.start_worker()
    world.run()
    started = [new.request_id for step in world.steps for new in step.new]
    assert started == [1, 2, 3, 4, 5]
    assert all(len(step.rows) <= 2 for step in world.steps)
    world.check_quiet()


def test_a_prompt_that_fills_the_context_but_for_one_token() -> None:
    world = World(max_model_len=20)
    world.add(1, prompt_len=19, max_tokens=50)
    world.run()
    assert world.ended[1].outcome == Finished(reason="length")
    assert world.tokens[1] == [scripted_token(1, 0)]


@pytest.mark.parametrize("prompt_len", [0, 20, 21])
def test_prompts_that_cannot_be_served_are_refused_at_once(prompt_len: int) -> None:
    world = World(max_model_len=20)
    world.add(1, prompt_len=prompt_len)
    outcome = world.ended[1].outcome
    assert isinstance(outcome, Failed)
    assert outcome.status == 400
    assert outcome.param == "prompt"


# Stops


def test_stop_token_tells_which() -> None:
    world = World()
    stop = scripted_token(1, 3)
    world.add(1, max_tokens=9, stop_token_ids=(stop,))
    world.run()
    assert world.ended[1].outcome == Finished(reason="stop", stop_reason=stop)
    assert world.ended[1].usage.num_output_tokens == 4
    world.check_quiet()


def test_min_tokens_suppresses_ends_on_the_worker() -> None:
    world = World()
    world.add(1, max_tokens=9, min_tokens=2, stop_token_ids=(7, EOS))
    world.run()
    assert world.steps[0].new[0].suppressed_token_ids == (EOS, 7)


def test_stop_string_cuts_the_count_and_ends_the_request() -> None:
    world = World()
    world.add(1, max_tokens=20)
    world.run_until(lambda: len(world.tokens.get(1, ())) == 5)
    world.tell(StopStringFound(request_id=1, token_index=2, stop_string="\n"))
    assert world.ended[1].outcome == Finished(reason="stop", stop_reason="\n")
    assert world.ended[1].usage.num_output_tokens == 3
    world.run()
    world.check_quiet()
    world.tell(StopStringFound(request_id=1, token_index=2))
    assert world.scheduler.status().counters.num_late_messages == 1


def test_tokens_behind_a_stop_string_found_in_the_same_activation_are_not_sent() -> None:
    world = World()
    world.add(1, max_tokens=20)
    world.run_until(lambda: len(world.tokens.get(1, ())) == 3)
    world.run_until(lambda: [type(m) for m in world.inboxes["scheduler"]] == [StepDone])
    done = world.inboxes["scheduler"].pop()
    world.tell(done, StopStringFound(request_id=1, token_index=2))
    assert len(world.tokens[1]) == 3
    assert world.ended[1].usage.num_output_tokens == 3
    world.run()
    world.check_quiet()


# Leaving


def test_abort_frees_within_a_step() -> None:
    world = World()
    world.add(1, max_tokens=100)
    world.add(2, max_tokens=100)
    world.run_until(lambda: len(world.tokens.get(2, ())) == 4)
    world.tell(Abort(request_id=1))
    assert isinstance(world.ended[1].outcome, Aborted)
    done = world.scheduler.status().counters.num_steps
    world.run_until(lambda: 1 not in world.scheduler._state.requests)
    assert world.scheduler.status().counters.num_steps - done <= 2
    world.tell(Abort(request_id=2))
    world.run()
    world.check_quiet()
    world.tell(Abort(request_id=2), Abort(request_id=77))
    assert world.scheduler.status().counters.num_late_messages == 2


@pytest.mark.parametrize("num_tokens", range(1, 10))
def test_what_was_computed_before_an_abort_is_cached_and_right(num_tokens: int) -> None:
    """Whatever the steps in flight computed beyond the tokens we know of must not count."""
    world = World()
    prompt = tuple(range(300, 305))
    world.add(1, prompt=prompt, max_tokens=100)
    world.run_until(
        lambda: (
            len(world.tokens.get(1, ())) >= num_tokens and world.scheduler.status().num_steps_in_flight == 2
        )
    )
    world.tell(Abort(request_id=1))
    known = prompt + tuple(world.tokens[1])
    world.run()
    world.check_quiet()
    world.add(2, prompt=(*known, 1, 2, 3, 4, 5), max_tokens=4)
    world.run()
    world.check_finished(2)
    assert world.ended[2].usage.num_cached_tokens == len(known) // BLOCK_SIZE * BLOCK_SIZE


def test_abort_of_a_waiting_request_whose_blocks_are_being_planned() -> None:
    world = World()
    world.deliver("scheduler")
    world.add(1)  # asked for at once
    world.tell(Abort(request_id=1))
    world.run()
    assert not world.steps
    world.check_quiet()


def test_deadline_fails_with_504() -> None:
    world = World(start=False)
    world.add(1, deadline_s=5.0)
    world.add(2, deadline_s=4.0)
    assert world.scheduler.next_timer_s() == 4.0
    world.advance(4.5)
    assert set(world.ended) == {2}
    outcome = world.ended[2].outcome
    assert isinstance(outcome, Failed)
    assert (outcome.status, outcome.code) == (504, "request_timeout")
    assert world.scheduler.next_timer_s() == 5.0
    world.tell(Abort(request_id=1))
    assert world.scheduler.next_timer_s() is None


def test_deadlines_of_requests_long_gone_do_not_pile_up() -> None:
    world = World()
    for request_id in range(1, 500):
        world.add(request_id, max_tokens=1, deadline_s=1e6)
        world.tell(Abort(request_id=request_id))
        world.run()
    assert len(world.scheduler._state.deadlines) < 200


def test_drain_ends_everything_and_refuses_what_comes() -> None:
    world = World(max_num_seqs=1)
    world.add(1, max_tokens=100)
    world.add(2)
    world.run_until(lambda: len(world.tokens.get(1, ())) == 4)
    world.tell(Drain())
    world.add(3)
    for request_id in (1, 2, 3):
        outcome = world.ended[request_id].outcome
        assert isinstance(outcome, Failed)
        assert outcome.status == 503
    world.run()
    world.check_quiet()


def test_a_row_in_error_fails_that_request_alone() -> None:
    world = World()
    world.errors[2] = "logits are not finite"
    for request_id in (1, 2, 3):
        world.add(request_id)
    world.run()
    outcome = world.ended[2].outcome
    assert isinstance(outcome, Failed)
    assert outcome.status == 500
    assert "logits are not finite" in outcome.message
    assert 2 not in world.tokens
    world.check_finished(1)
    world.check_finished(3)
    world.check_quiet()


def test_late_answers_are_ignored_and_counted() -> None:
    world = World()
    world.add(1)
    world.run()
    late = StepDone(pool_epoch=0, step_id=99, results=(), times=TIMES)
    world.tell(late, WorkerLost(pool_epoch=0, reason="", restarting=True), WorkerReady(pool_epoch=1))
    assert world.scheduler.status().counters.num_late_messages == 3
    with pytest.raises(InvariantViolated, match="step 99 is done"):
        world.tell(StepDone(pool_epoch=1, step_id=99, results=(), times=TIMES))


def test_a_request_added_twice_is_a_bug() -> None:
    world = World()
    world.add(1)
    with pytest.raises(InvariantViolated, match="added twice"):
        world.add(1)


# Room


def test_preempted_request_resumes_with_no_token_missing_or_doubled() -> None:
    world = World(num_blocks=12, prefix_caching=False)
    for request_id in (1, 2, 3):
        world.add(request_id, prompt_len=9, max_tokens=14)
    world.run()
    for request_id in (1, 2, 3):
        world.check_finished(request_id)
    world.check_quiet()
    assert world.scheduler.status().counters.num_preemptions >= 1
    resumed = [new for step in world.steps for new in step.new if len(new.token_ids) > new.prompt_len]
    assert resumed
    assert all(new.prompt_len == 9 for new in resumed)
    assert 1 not in [new.request_id for new in resumed], "the oldest never loses its place"


def test_cached_tokens_count_at_the_first_run_only() -> None:
    world = World(num_blocks=14)
    shared = tuple(range(200, 208))
    world.add(1, prompt=(*shared, 1001), max_tokens=2)
    world.run()
    for request_id in (2, 3, 4):
        world.add(request_id, prompt=(*shared, 1000 + request_id), max_tokens=22)
    world.run()
    counters = world.scheduler.status().counters
    assert counters.num_preemptions >= 1
    assert [world.ended[i].usage.num_cached_tokens for i in (1, 2, 3, 4)] == [0, 8, 8, 8]
    assert counters.num_cached_tokens == 24
    assert counters.num_prompt_tokens == 36
    cache = world.scheduler.status().cache
    assert cache is not None
    assert cache.num_hit_tokens == 24


def test_a_prompt_larger_than_the_pool_fails_and_blocks_nobody() -> None:
    world = World(num_blocks=8)
    world.add(1, prompt_len=60, max_tokens=4)
    world.add(2)
    world.run()
    outcome = world.ended[1].outcome
    assert isinstance(outcome, Failed)
    assert outcome.status == 400
    assert "60 tokens" in outcome.message
    assert "8 blocks of 4" in outcome.message
    world.check_finished(2)
    world.check_quiet()


def test_a_request_that_would_outgrow_the_whole_pool_is_refused_and_one_that_just_fits_does_not() -> None:
    world = World(num_blocks=8)
    world.add(1, prompt_len=8, max_tokens=26)
    world.add(2, prompt_len=8, max_tokens=25)  # with its prompt exactly the pool: the last one needs no KV
    world.run()
    outcome = world.ended[1].outcome
    assert isinstance(outcome, Failed)
    assert (outcome.status, outcome.param, outcome.code) == (400, "max_tokens", "context_length_exceeded")
    assert "need KV for 33 tokens" in outcome.message
    assert "8 blocks of 4 tokens; the largest max_tokens for this prompt is 25" in outcome.message
    assert "larger --kv-cache-memory" in outcome.message
    assert world.ended[1].usage.num_output_tokens == 0
    world.check_finished(2)
    world.check_quiet()


def test_endless_pressure_makes_progress_without_thrashing() -> None:
    world = World(num_blocks=16, prefix_caching=False, max_num_batched_tokens=16)
    for request_id in range(1, 13):
        world.add(request_id, prompt_len=7 + request_id % 5, max_tokens=20)
    world.run()
    for request_id in range(1, 13):
        world.check_finished(request_id)
    world.check_quiet()
    counters = world.scheduler.status().counters
    needed = sum(7 + request_id % 5 + 19 for request_id in range(1, 13))
    assert counters.num_computed_tokens < 2 * needed


def test_waiting_for_room_is_not_asking_all_the_time() -> None:
    world = World(num_blocks=10, prefix_caching=False)
    world.add(1, prompt_len=20, max_tokens=20)
    world.add(2, prompt_len=20, max_tokens=20)
    asked = 0
    while world.inboxes["block_allocator"] or world.step():
        for message in world.inboxes["block_allocator"]:
            if isinstance(message, PlanBlocks):
                asked += any(demand.request_id == 2 and demand.new for demand in message.demands)
        world.step()
    world.check_finished(2)
    assert asked <= 8


# Form


def test_decodes_are_reported_when_a_block_is_full() -> None:
    world = World()
    seen: list[PlanBlocks] = []
    original = world.cores["block_allocator"].handle  # type: ignore[attr-defined]

    def handle(now_s: float, messages: list) -> list:
        seen.extend(m for m in messages if isinstance(m, PlanBlocks))
        return original(now_s, messages)

    world.cores["block_allocator"].handle = handle  # type: ignore[attr-defined]
    world.add(1, prompt_len=6, max_tokens=12)
    world.run()
    updates = [update for plan in seen for update in plan.updates]
    assert [update.num_computed_tokens for update in updates] == [6, 8, 12, 16]
    ids = [token_id for update in updates for token_id in update.token_ids]
    assert ids == world.tokens[1][: len(ids)]
    assert sum(len(plan.releases) for plan in seen) == 1


def test_plans_come_after_the_pools_are_reset() -> None:
    scheduler = Scheduler(
        SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64, block_size=BLOCK_SIZE)
    )
    assert scheduler.status().worker == "starting"
    said = scheduler.handle(0.0, [WorkerReady(pool_epoch=1)])
    assert [message for _, message in said] == [ResetPools(pool_epoch=1)]
    assert scheduler.status().worker == "ready"


def test_a_snapshot_taken_anywhere_goes_on_the_same() -> None:
    def play(restore_at: int | None) -> tuple[dict[int, list[int]], list[StepPlan]]:
        world = World(num_blocks=12)
        for request_id in (1, 2, 3):
            world.add(request_id, prompt_len=9, max_tokens=14)
        count = 0
        while world.step():
            count += 1
            if count == restore_at:
                snapshot = world.scheduler.snapshot()
                world.scheduler = Scheduler(world.scheduler.settings)
                world.scheduler.restore(snapshot)
        world.check_quiet()
        return world.tokens, world.steps

    plain = play(None)
    for restore_at in range(1, 60, 3):
        assert play(restore_at) == plain
