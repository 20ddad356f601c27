"""What is set aside for who is let in is what can be needed, and is taken from nobody."""

from __future__ import annotations

import msgspec
import pytest

from ksana.cache.block_allocator import BlockAllocator
from ksana.cache.cache_config import CacheConfig
from ksana.messages.blocks import AllocateRequestBlocks, BlocksPlanned, PlanBlocks
from ksana.messages.swa import SwaDemand, SwaGranted, SwaRefused
from ksana.messages.swa_remote import SwaAnswer, SwaCall, SwaProbe
from simulations.checks.admission_watch import AdmissionWatch, check_lapsed, check_reserved
from simulations.checks.promises import BrokenPromise
from tests.cache.test_swa_manager import Pair, more, new
from tests.simulations.worlds import ENGINE

CONFIG = CacheConfig(block_size=4, num_fa_blocks=32, num_swa_blocks=12, sliding_window=8)


def pair() -> Pair:
    return Pair(window=8, block_size=4, num_fa=32, num_swa=12)


def test_what_is_set_aside_lapses_when_a_request_grows_past_it() -> None:
    both = pair()
    both.plan(new(1, tuple(range(10)), reserved=14))
    for start in range(10, 18):
        both.plan(more(1, start))
        check_lapsed(both.allocator, both.manager)
    request = both.manager.tables.requests[1]
    assert request.end_index == 5
    assert request.num_reserved == 0
    request.num_reserved = 3  # as it was
    with pytest.raises(BrokenPromise, match="request 1 has come to SWA block 5, 4 were reserved"):
        check_lapsed(both.allocator, both.manager)


@pytest.mark.parametrize(
    ("first", "end", "chunk", "plan_ahead", "expected"),
    [
        (0, 14, 10, True, 4),  # all its blocks
        (2, 14, 10, True, 2),  # those from where its window begins
        (0, 200, 4, True, 5),  # a window of 2 blocks, one for where it begins, two chunks
        (0, 200, 4, False, 4),
        (0, 200, 64, True, 12),  # the pool
    ],
)
def test_what_a_request_can_need(first: int, end: int, chunk: int, plan_ahead: bool, expected: int) -> None:
    config = msgspec.structs.replace(CONFIG, plan_ahead=plan_ahead)
    check_reserved(config, expected, first, end, chunk)
    for wrong in (expected - 1, expected + 1):
        with pytest.raises(BrokenPromise, match=f"it can need {expected}"):
            check_reserved(config, wrong, first, end, chunk)


def test_too_much_set_aside_is_noticed_when_the_request_is_let_in() -> None:
    both = pair()
    tables = both.manager.tables
    take_for_new = tables.take_for_new

    def greedy(demand: SwaDemand, budget: int, step_budget: int) -> SwaGranted | SwaRefused:
        outcome = take_for_new(demand, budget, step_budget)
        tables.requests[demand.request_id].num_reserved += 1
        return outcome

    setattr(tables, "take_for_new", greedy)  # noqa: B010 - a method, to mypy
    AdmissionWatch(ENGINE).attach(both.allocator, both.manager)
    with pytest.raises(BrokenPromise, match="5 SWA blocks are reserved from block 0 to token 14"):
        both.plan(new(1, tuple(range(10)), reserved=14))


def ask(allocator: BlockAllocator, step_id: int, *demands: AllocateRequestBlocks) -> BlocksPlanned:
    plan = PlanBlocks(
        pool_epoch=1,
        step_id=step_id,
        done_step_id=step_id - 1,
        token_budget=8,
        updates=(),
        releases=(),
        demands=demands,
    )
    ((_, answer),) = allocator.handle(0.0, [plan])
    assert isinstance(answer, BlocksPlanned)
    return answer


@pytest.mark.parametrize("is_wrong", [False, True])
def test_who_comes_takes_nothing_that_others_were_promised(is_wrong: bool) -> None:
    """10 blocks: 4 are promised to the first and 5 to the second, and so the third gets the one left."""
    allocator = BlockAllocator(CacheConfig(block_size=4, num_fa_blocks=10))
    if is_wrong:
        make_room = allocator.fa.make_room

        def promise_twice(num_blocks: int) -> None:
            make_room(num_blocks)
            allocator.fa.num_set_aside += len(allocator.fa.requests) == 3

        setattr(allocator.fa, "make_room", promise_twice)  # noqa: B010 - a method, to mypy
    AdmissionWatch(ENGINE).attach(allocator, None)
    ask(allocator, 1, new(1, (1, 2, 3), reserved=16), new(2, (4, 5, 6), reserved=20))
    assert allocator.fa.num_set_aside == 7
    assert [refusal.reason for refusal in ask(allocator, 2, new(3, (7, 8), reserved=8)).refusals] == [
        "no_room"
    ]
    if not is_wrong:
        assert ask(allocator, 3, new(3, (7, 8), reserved=4)).grants
        return
    with pytest.raises(BrokenPromise, match="take_for_new took what others were promised"):
        ask(allocator, 3, new(3, (7, 8), reserved=4))


def loading() -> Pair:
    """A request that is told of its prefix, while nothing of it is cached."""
    both = pair()
    AdmissionWatch(ENGINE).attach(both.allocator, both.manager)
    return both


PROBE = SwaProbe(pool_epoch=1, request_id=1, fa_blocks=(), num_total_tokens=10, num_reserved_tokens=14)


def test_what_is_set_aside_for_a_load_is_what_it_can_need() -> None:
    both = loading()
    both.manager.handle(0.0, [PROBE])
    assert both.manager.loading.num_set_aside == 4
    check_lapsed(both.allocator, both.manager)
    both.manager.loading.num_set_aside = 0
    with pytest.raises(BrokenPromise, match="0 SWA blocks are set aside for loads, 4 were promised"):
        check_lapsed(both.allocator, both.manager)


def test_a_load_for_which_too_little_is_set_aside_is_noticed() -> None:
    both = pair()
    call = both.manager._call
    short = msgspec.structs.replace(PROBE, num_reserved_tokens=0)

    def careless(_call: SwaCall) -> list[SwaAnswer]:
        return call(short)

    setattr(both.manager, "_call", careless)  # noqa: B010 - a method, to mypy
    AdmissionWatch(ENGINE).attach(both.allocator, both.manager)
    with pytest.raises(BrokenPromise, match="3 SWA blocks are reserved"):
        both.manager.handle(0.0, [PROBE])
