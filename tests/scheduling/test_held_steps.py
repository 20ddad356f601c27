"""`hold_when_short`: no step goes out without a running request that lacks a block while one can be had."""

from __future__ import annotations

import pytest

from ksana.messages.blocks import BlocksGranted, BlocksPlanned, BlockTableEdit, CacheCounters
from tests.scheduling.test_answers import USE, Desk
from tests.scheduling.world import World


def missed_turns(world: World) -> int:
    """How often a request is in one step, is not in the next, and is in a later one without a new start."""
    missed = 0
    last_seen: dict[int, int] = {}
    for index, step in enumerate(world.steps):
        new = {row.request_id for row in step.new}
        for row in step.rows:
            before = last_seen.get(row.request_id)
            if row.request_id not in new and before is not None and before < index - 1:
                missed += 1
            last_seen[row.request_id] = index
    return missed


@pytest.mark.parametrize("hold_when_short", [False, True])
def test_nobody_loses_a_turn_when_steps_are_held(hold_when_short: bool) -> None:
    world = World(num_blocks=24, max_num_seqs=6, hold_when_short=hold_when_short)
    for request_id in range(1, 7):
        world.add(request_id, prompt_len=9, max_tokens=40)
    world.run()
    for request_id in range(1, 7):
        world.check_finished(request_id)
    world.check_quiet()
    assert world.scheduler.status().counters.num_preemptions >= 2
    assert (missed_turns(world) == 0) == hold_when_short


def test_a_held_step_is_asked_for_again_when_its_victim_is_gone() -> None:
    desk = Desk(4, hold_when_short=True)
    desk.answer({4: "no_room"})  # 1, 2 and 3 run, 4 waits
    assert desk.demanded() == [1, 2, 3]
    desk.answer({2: "no_room"})
    assert len(desk.steps) == 1, "2 lacks a block: the step is not sent"
    assert desk.scheduler.status().counters.num_preemptions == 1
    assert len(desk.plans) == 2, "and nothing is asked while the victim's last step runs"
    desk.done(desk.steps[0])
    assert desk.released() == [3]
    assert desk.demanded() == [1, 2], "the same again, without the victim; 3 and 4 are not let in"
    desk.answer()
    assert [row.request_id for row in desk.steps[1].rows] == [1, 2]
    assert desk.demanded()[:2] == [1, 2]
    assert desk.demanded()[2:] == [3, 4], "in the next step they are"


def test_blocks_granted_to_a_held_step_reach_the_worker_once() -> None:
    desk = Desk(3, hold_when_short=True)
    desk.answer()
    plan = desk.plans[-1]
    grants = tuple(
        BlocksGranted(
            request_id=demand.request_id,
            start=demand.num_computed_tokens,
            num_tokens=demand.num_tokens,
            fa_write_start=demand.num_computed_tokens,
            fa_edits=(BlockTableEdit(1, demand.request_id + 10),),
        )
        for demand in plan.demands
        if demand.request_id != 2
    )
    desk.tell(
        BlocksPlanned(
            pool_epoch=1,
            step_id=plan.step_id,
            grants=grants,
            refusals=desk.refusals({2: "no_room"}),
            edits=(),
            copies=(),
            fa_use=USE,
            swa_use=None,
            counters=CacheCounters(),
        )
    )
    desk.done(desk.steps[0])
    desk.answer()
    (edits,) = desk.steps[1].edits  # 3 lost its place, and what it was granted with it
    assert (edits.request_id, edits.fa_edits) == (1, (BlockTableEdit(1, 11),))
    desk.done(desk.steps[1])
    desk.answer()
    assert desk.steps[2].edits == ()


def test_the_last_one_running_is_not_held_for_itself() -> None:
    desk = Desk(1, hold_when_short=True, plan_ahead=False)
    desk.answer()
    desk.done(desk.steps[0])
    desk.answer({1: "no_room"})
    assert desk.outputs[-1].ended, "nothing can give way, so it ends"
