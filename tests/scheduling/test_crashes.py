"""Crashes of the worker: nothing is lost or doubled, and only the culprit fails."""

from __future__ import annotations

import math

import pytest

from ksana.messages.blocks import BlocksPlanned
from ksana.messages.outputs import Failed
from ksana.messages.requests import Abort
from ksana.messages.steps import WorkerLost, WorkerReady
from tests.scheduling.world import World


def failed_ids(world: World) -> list[int]:
    return sorted(i for i, ended in world.ended.items() if isinstance(ended.outcome, Failed))


def test_a_killed_worker_costs_nobody_a_token() -> None:
    world = World()
    for request_id in range(1, 7):
        world.add(request_id, max_tokens=12)
    world.run_until(
        lambda: len(world.tokens.get(3, ())) >= 4 and world.scheduler.status().num_steps_in_flight == 2
    )
    world.crash()
    world.start_worker()
    world.run()
    for request_id in range(1, 7):
        world.check_finished(request_id)
    world.check_quiet()
    status = world.scheduler.status()
    assert status.counters.num_worker_losses == 1
    assert status.counters.num_preemptions == 0
    assert status.num_suspects == 0


def test_a_request_alone_survives_one_kill_but_not_two_at_the_same_place() -> None:
    world = World()
    world.add(1, max_tokens=12)
    world.run_until(lambda: len(world.tokens.get(1, ())) == 4)
    world.crash()
    world.start_worker()
    sent = len(world.steps)
    world.run_until(lambda: len(world.steps) > sent)
    assert 1 not in world.ended
    world.crash()
    world.start_worker()
    world.run()
    outcome = world.ended[1].outcome
    assert isinstance(outcome, Failed)
    assert outcome.status == 500
    assert "lost twice" in outcome.message
    assert world.ended[1].usage.num_output_tokens == 4


def test_kills_far_apart_never_add_up() -> None:
    world = World()
    world.add(1, max_tokens=40)
    for num_tokens in (5, 15, 25, 35):
        world.run_until(lambda n=num_tokens: len(world.tokens.get(1, ())) >= n)
        world.crash()
        world.start_worker()
    world.run()
    world.check_finished(1)


@pytest.mark.parametrize("plan_ahead", [True, False])
@pytest.mark.parametrize("culprit", [1, 7, 16])
@pytest.mark.parametrize("at_token", [3, 9])
def test_one_poisonous_request_among_sixteen_fails_alone(
    culprit: int, plan_ahead: bool, at_token: int
) -> None:
    """In its prefill (3) or in a decode (9)."""
    world = World(max_num_seqs=16, num_blocks=200, max_num_batched_tokens=128, plan_ahead=plan_ahead)
    world.poison = lambda row: row.request_id == culprit and row.start + row.num_tokens > at_token
    for request_id in range(1, 17):
        world.add(request_id, prompt_len=5, max_tokens=12)
    world.run()
    assert failed_ids(world) == [culprit]
    for request_id in range(1, 17):
        if request_id != culprit:
            world.check_finished(request_id)
    world.check_quiet()
    assert world.num_crashes <= math.log2(16) + 1


def test_two_poisonous_requests_both_fail_and_nobody_else() -> None:
    world = World(max_num_seqs=16, num_blocks=200, max_num_batched_tokens=128)
    world.poison = lambda row: row.request_id in (2, 11) and row.start + row.num_tokens > 8
    for request_id in range(1, 17):
        world.add(request_id, prompt_len=5, max_tokens=12)
    world.run()
    assert failed_ids(world) == [2, 11]
    world.check_quiet()


def test_a_suspect_is_tried_with_nobody_else_in_the_worker() -> None:
    world = World(max_num_seqs=8, num_blocks=100)
    for request_id in range(1, 5):
        world.add(request_id, max_tokens=10)
    world.run_until(lambda: all(len(world.tokens.get(i, ())) >= 3 for i in range(1, 5)))
    world.add(9, max_tokens=10)  # innocent, and must wait for the trials
    world.crash()
    world.start_worker()
    sent = len(world.steps)
    world.tell(world.inboxes["scheduler"].pop(0))
    while world.scheduler.status().num_suspects:
        assert world.step()
        in_flight = {row.request_id for step in world.scheduler._state.steps for row in step.rows}
        assert in_flight <= {1, 2} or in_flight <= {3, 4}
    trial_steps = [frozenset(row.request_id for row in step.rows) for step in world.steps[sent:]]
    groups = list(dict.fromkeys(trial_steps))
    assert groups[0] == {1, 2}
    assert all(group <= {1, 2} or group <= {3, 4} for group in groups[:2])
    world.run()
    for request_id in (1, 2, 3, 4, 9):
        world.check_finished(request_id)


def test_a_crash_of_a_chunked_prefill_blames_those_in_flight_only() -> None:
    world = World(max_num_batched_tokens=16, num_blocks=100)
    world.poison = lambda row: row.request_id == 2 and row.start >= 16
    world.add(1, prompt_len=5, max_tokens=30)
    world.add(2, prompt_len=60, max_tokens=4)
    world.add(3, prompt_len=60, max_tokens=4)
    world.run()
    assert failed_ids(world) == [2]
    world.check_finished(1)
    world.check_finished(3)
    world.check_quiet()


def test_a_suspect_that_leaves_ends_its_trial() -> None:
    world = World()
    world.add(1, max_tokens=12)
    world.add(2, max_tokens=12)
    world.run_until(lambda: len(world.tokens.get(2, ())) == 4)
    world.crash()
    world.tell(world.inboxes["scheduler"].pop())
    world.tell(Abort(request_id=1))
    world.start_worker()
    world.run()
    world.check_finished(2)
    world.check_quiet()


def test_a_crash_is_not_blamed_on_one_while_another_that_just_ended_was_in_flight() -> None:
    world = World()
    for request_id in (1, 2, 3):
        world.add(request_id, max_tokens=12)
    world.run_until(lambda: len(world.tokens.get(3, ())) == 4)
    world.crash()
    world.start_worker()
    sent = len(world.steps)
    world.run_until(lambda: len(world.steps) > sent)
    assert [row.request_id for row in world.steps[-1].rows] == [1, 2]
    world.tell(Abort(request_id=2))
    world.crash()
    world.start_worker()
    world.run()
    world.check_finished(1)
    world.check_finished(3)
    world.check_quiet()


def test_a_crash_while_idle_suspects_nobody() -> None:
    world = World()
    world.run()
    world.crash()
    world.start_worker()
    world.add(1)
    world.run()
    world.check_finished(1)


def test_given_up_fails_all_and_refuses_until_a_worker_is_ready() -> None:
    world = World()
    world.add(1, max_tokens=20)
    world.run_until(lambda: len(world.tokens.get(1, ())) == 4)
    world.crash(restarting=False)
    world.run()
    world.add(2)
    for request_id in (1, 2):
        outcome = world.ended[request_id].outcome
        assert isinstance(outcome, Failed)
        assert (outcome.status, outcome.code) == (503, "worker_lost")
    assert world.scheduler.status().worker == "lost"
    world.check_quiet()
    world.start_worker()
    world.run()
    world.add(3)
    world.run()
    world.check_finished(3)
    world.check_quiet()


def test_a_worker_that_dies_while_loading_until_given_up() -> None:
    world = World(start=False)
    world.add(1)
    world.tell(WorkerLost(pool_epoch=1, reason="no memory", restarting=True))
    assert 1 not in world.ended
    assert world.scheduler.status().worker == "restarting"
    world.tell(WorkerLost(pool_epoch=2, reason="no memory", restarting=False))
    outcome = world.ended[1].outcome
    assert isinstance(outcome, Failed)
    assert "no memory" in outcome.message


def test_a_plan_made_in_the_activation_that_brings_the_loss_is_not_sent() -> None:
    world = World()
    world.add(1)
    world.run_until(lambda: [type(m) for m in world.inboxes["scheduler"]] == [BlocksPlanned])
    answer = world.inboxes["scheduler"].pop()
    world.tell(answer, WorkerLost(pool_epoch=1, reason="killed", restarting=True))
    assert not world.steps
    assert world.scheduler.status().num_suspects == 0


def test_a_worker_replaced_without_word_of_the_loss() -> None:
    world = World()
    world.add(1, max_tokens=12)
    world.run_until(lambda: len(world.tokens.get(1, ())) == 4)
    world.inboxes["executor"].clear()
    world.inboxes["scheduler"].clear()
    world.start_worker()
    world.run()
    world.check_finished(1)
    world.check_quiet()


def test_an_answer_to_a_plan_of_the_former_epoch_is_ignored() -> None:
    world = World()
    world.add(1, max_tokens=12)
    world.run_until(lambda: len(world.tokens.get(1, ())) == 4 and bool(world.inboxes["block_allocator"]))
    world.deliver("block_allocator")
    answer = world.inboxes["scheduler"].pop()
    world.tell(WorkerLost(pool_epoch=1, reason="killed", restarting=True), WorkerReady(pool_epoch=2))
    late = world.scheduler.status().counters.num_late_messages
    world.tell(answer)
    assert world.scheduler.status().counters.num_late_messages == late + 1
