"""The block allocator without sliding layers, one batch at a time."""

from __future__ import annotations

import pytest

from ksana.cache.block_allocator import BlockAllocator
from ksana.cache.cache_config import CacheConfig
from ksana.errors import InvariantViolated
from ksana.messages.blocks import (
    AllocateRequestBlocks,
    BlocksGranted,
    BlocksPlanned,
    NewRequestBlocks,
    PlanBlocks,
    ReleaseRequest,
    ResetPools,
    UpdateRequestTokens,
)


class Steps:
    """Asks an allocator step by step; the step before is done unless `lag` says otherwise."""

    def __init__(self, num_blocks: int = 10, *, block_size: int = 4, caching: bool = True) -> None:
        self.allocator = BlockAllocator(
            CacheConfig(block_size=block_size, num_fa_blocks=num_blocks, enable_prefix_caching=caching)
        )
        self.step_id = 0

    def plan(
        self,
        *demands: AllocateRequestBlocks,
        updates: tuple[UpdateRequestTokens, ...] = (),
        releases: tuple[int, ...] = (),
        budget: int = 1000,
        lag: int = 1,
    ) -> BlocksPlanned:
        self.step_id += 1
        said = self.allocator.handle(
            0.0,
            [
                PlanBlocks(
                    pool_epoch=1,
                    step_id=self.step_id,
                    done_step_id=max(0, self.step_id - lag),
                    token_budget=budget,
                    updates=updates,
                    releases=tuple(ReleaseRequest(request_id=r) for r in releases),
                    demands=demands,
                )
            ],
        )
        self.allocator.check()
        [(address, answer)] = said
        assert address == "scheduler"
        assert isinstance(answer, BlocksPlanned)
        return answer


def new(
    request_id: int,
    tokens: tuple[int, ...],
    num_tokens: int | None = None,
    *,
    salt: str = "",
    reserved: int = 0,
) -> AllocateRequestBlocks:
    return AllocateRequestBlocks(
        request_id=request_id,
        num_computed_tokens=0,
        num_tokens=num_tokens or len(tokens),
        new=NewRequestBlocks(token_ids=tokens, cache_salt=salt, num_reserved_tokens=reserved),
    )


def more(request_id: int, start: int, num_tokens: int = 1) -> AllocateRequestBlocks:
    return AllocateRequestBlocks(request_id=request_id, num_computed_tokens=start, num_tokens=num_tokens)


def done(request_id: int, computed: int, tokens: tuple[int, ...] = ()) -> UpdateRequestTokens:
    return UpdateRequestTokens(request_id=request_id, token_ids=tokens, num_computed_tokens=computed)


def table(grant: BlocksGranted) -> list[int]:
    return [edit.block_id for edit in grant.fa_edits]


PROMPT = tuple(range(100, 110))


def test_a_block_comes_with_the_step_that_writes_it_and_not_before() -> None:
    steps = Steps()
    [grant] = steps.plan(new(1, tuple(range(7)))).grants
    assert len(grant.fa_edits) == 2
    assert steps.plan(more(1, 7)).grants[0].fa_edits == ()  # tokens 0..7 fill two blocks exactly
    [grant] = steps.plan(more(1, 8)).grants
    assert [edit.index for edit in grant.fa_edits] == [2]


def test_as_many_tokens_as_the_pool_holds_fit_and_one_more_never_does() -> None:
    steps = Steps(2)
    assert len(steps.plan(new(1, tuple(range(8)))).grants[0].fa_edits) == 2
    assert steps.plan(new(2, tuple(range(9)))).refusals[0].reason == "never"
    answer = steps.plan(more(1, 8), updates=(done(1, 8),))
    assert [(r.request_id, r.reason) for r in answer.refusals] == [(1, "never")]


def test_what_will_outgrow_the_pool_is_refused_for_good_before_it_begins() -> None:
    for num_at_most, num_grants in ((0, 1), (3, 1), (8, 1), (9, 0)):
        steps = Steps(2)
        tokens = NewRequestBlocks(token_ids=(1, 2, 3), num_tokens_at_most=num_at_most)
        demand = AllocateRequestBlocks(request_id=1, num_computed_tokens=0, num_tokens=3, new=tokens)
        answer = steps.plan(demand)
        assert len(answer.grants) == num_grants
        assert [r.reason for r in answer.refusals] == ["never"] * (1 - num_grants)


def test_second_request_starts_behind_the_shared_blocks() -> None:
    steps = Steps()
    first = steps.plan(new(1, PROMPT)).grants[0]
    answer = steps.plan(new(2, PROMPT), updates=(done(1, 10),))
    [second] = answer.grants
    assert (second.start, second.num_tokens, second.fa_write_start) == (8, 2, 8)
    assert table(second)[:2] == table(first)[:2]
    assert table(second)[2] != table(first)[2]
    assert answer.counters.num_hit_tokens == 8
    assert answer.counters.num_queried_tokens == 20


def test_blocks_join_only_when_their_step_is_done() -> None:
    steps = Steps()
    steps.plan(new(1, PROMPT))
    [second] = steps.plan(new(2, PROMPT), lag=2).grants
    assert second.start == 0


def test_the_last_token_is_always_computed() -> None:
    steps = Steps()
    steps.plan(new(1, PROMPT[:8]))
    [second] = steps.plan(new(2, PROMPT[:8]), updates=(done(1, 8),)).grants
    assert (second.start, second.num_tokens) == (4, 4)
    [third] = steps.plan(new(3, PROMPT[:9])).grants
    assert (third.start, third.num_tokens) == (8, 1)


def test_salts_never_share() -> None:
    steps = Steps(20)
    steps.plan(new(1, PROMPT, salt="a"))
    grants = steps.plan(
        new(2, PROMPT, salt="b"), new(3, PROMPT), new(4, PROMPT, salt="a"), updates=(done(1, 10),)
    ).grants
    assert [grant.start for grant in grants] == [0, 0, 8]


def test_equal_blocks_merge_and_the_later_one_waits_for_the_step_in_flight() -> None:
    steps = Steps()
    first, second = steps.plan(new(1, PROMPT), new(2, PROMPT)).grants
    steps.plan(more(1, 10), more(2, 10), lag=2)
    answer = steps.plan(updates=(done(1, 10), done(2, 10)), lag=2)
    [edits] = answer.edits
    assert edits.request_id == 2
    assert [(e.index, e.block_id) for e in edits.fa_edits] == list(enumerate(table(first)[:2]))
    assert answer.fa_use.num_deferred == 2  # step 2 still names them
    assert answer.fa_use.num_referenced == 4
    answer = steps.plan()
    assert answer.fa_use.num_deferred == 0
    assert answer.fa_use.num_free == 6
    answer = steps.plan(releases=(1, 2))
    assert (answer.fa_use.num_free, answer.fa_use.num_cached) == (8, 2)
    assert set(table(second)[:2]).isdisjoint(table(steps.plan(new(3, PROMPT)).grants[0])[:2])


def test_released_blocks_wait_for_the_step_in_flight() -> None:
    steps = Steps()
    steps.plan(new(1, PROMPT))
    steps.plan(more(1, 10), lag=2)
    answer = steps.plan(updates=(done(1, 10),), releases=(1,), lag=2)
    assert answer.fa_use.num_deferred == 3
    assert answer.refusals == ()
    answer = steps.plan()
    assert (answer.fa_use.num_deferred, answer.fa_use.num_cached, answer.fa_use.num_free) == (0, 2, 8)


def test_deferred_blocks_can_be_matched_again() -> None:
    steps = Steps()
    steps.plan(new(1, PROMPT))
    steps.plan(more(1, 10), lag=2)
    answer = steps.plan(new(2, PROMPT), updates=(done(1, 10),), releases=(1,), lag=2)
    assert answer.grants[0].start == 8
    assert (answer.fa_use.num_deferred, answer.fa_use.num_referenced) == (1, 3)


def test_budget_is_shared_in_order() -> None:
    steps = Steps(20)
    answer = steps.plan(new(1, PROMPT), new(2, PROMPT), new(3, PROMPT), budget=14)
    assert [grant.num_tokens for grant in answer.grants] == [10, 4]
    assert [(r.request_id, r.reason) for r in answer.refusals] == [(3, "budget")]
    answer = steps.plan(more(1, 10), more(2, 4, 6), new(4, PROMPT), budget=6)
    assert [grant.num_tokens for grant in answer.grants] == [1, 5]
    assert answer.refusals[0].reason == "budget"


def test_no_overtaking_by_new_requests_but_running_ones_are_tried() -> None:
    steps = Steps(4)
    steps.plan(new(1, PROMPT[:3]))
    answer = steps.plan(new(2, tuple(range(14))), new(3, (1, 2)), more(1, 3))
    assert [(r.request_id, r.reason) for r in answer.refusals] == [(2, "no_room"), (3, "behind")]
    assert [grant.request_id for grant in answer.grants] == [1]


def test_never_when_the_empty_pool_is_too_small() -> None:
    steps = Steps(4)
    assert steps.plan(new(1, tuple(range(17)), 4)).refusals[0].reason == "never"
    assert steps.plan(new(1, tuple(range(16)), 4)).grants
    assert steps.plan(more(1, 4, 13)).refusals[0].reason == "never"


def test_admission_counts_what_is_reserved_for_others() -> None:
    steps = Steps(6)
    long = tuple(range(14))
    steps.plan(new(1, long, 4, reserved=16))  # has 2 blocks, 2 more are set aside
    answer = steps.plan(new(2, (1, 2, 3), reserved=9))
    assert answer.refusals[0].reason == "no_room"
    assert steps.plan(new(2, (1, 2, 3), reserved=8)).grants
    assert steps.plan(more(1, 4, 10)).grants


def test_eviction_takes_the_least_recently_used_leaves() -> None:
    steps = Steps(6)
    a, b = tuple(range(8)), tuple(range(50, 58))
    table_a = table(steps.plan(new(1, a)).grants[0])
    table_b = table(steps.plan(new(2, b)).grants[0])
    answer = steps.plan(updates=(done(1, 8), done(2, 8)), releases=(2, 1))
    assert (answer.fa_use.num_free, answer.fa_use.num_cached) == (2, 4)
    answer = steps.plan(new(3, tuple(range(80, 91))))  # 3 blocks: 2 free, then the end of b
    assert table_b[1] in table(answer.grants[0])
    assert answer.counters.num_fa_evictions == 1
    answer = steps.plan(new(4, (*a, 1), 1))
    assert answer.grants[0].start == 8
    assert table(answer.grants[0]) == [*table_a[:2], table_b[0]]


def test_a_match_pins_what_it_found() -> None:
    steps = Steps(3)
    steps.plan(new(1, PROMPT[:8]))
    steps.plan(updates=(done(1, 8),), releases=(1,))
    answer = steps.plan(new(2, (*PROMPT[:8], 1, 2, 3, 4, 5), 6))
    assert answer.refusals[0].reason == "never"
    answer = steps.plan(new(2, (*PROMPT[:8], 1, 2, 3, 4), 4))
    assert answer.grants[0].start == 8
    assert answer.counters.num_fa_evictions == 0


def test_a_resumed_request_finds_its_blocks_and_is_not_counted_again() -> None:
    steps = Steps()
    steps.plan(new(1, PROMPT))
    tokens = NewRequestBlocks(token_ids=(*PROMPT, 7), resumed=True)
    again = AllocateRequestBlocks(request_id=1, num_computed_tokens=0, num_tokens=11, new=tokens)
    answer = steps.plan(again, updates=(done(1, 10),), releases=(1,))
    assert answer.grants[0].start == 8
    assert (answer.counters.num_queried_tokens, answer.counters.num_hit_tokens) == (10, 0)


def test_caching_off_gives_everything_back() -> None:
    steps = Steps(caching=False)
    steps.plan(new(1, PROMPT))
    answer = steps.plan(new(2, PROMPT), updates=(done(1, 10),), releases=(1,))
    assert answer.grants[0].start == 0
    answer = steps.plan(releases=(2,))
    assert (answer.fa_use.num_free, answer.fa_use.num_cached) == (10, 0)


def test_reset_forgets_everything_but_the_totals() -> None:
    steps = Steps()
    steps.plan(new(1, PROMPT))
    steps.plan(new(2, PROMPT), updates=(done(1, 10),))
    assert steps.allocator.handle(0.0, [ResetPools(pool_epoch=2)]) == []
    with pytest.raises(InvariantViolated, match="epoch 1 in epoch 2"):
        steps.plan()
    answer = PlanBlocks(pool_epoch=2, step_id=9, done_step_id=8, token_budget=99, demands=(new(1, PROMPT),))
    [(_, planned)] = steps.allocator.handle(0.0, [answer])
    assert isinstance(planned, BlocksPlanned)
    assert planned.grants[0].start == 0
    assert planned.fa_use.num_free == 7
    assert planned.counters.num_hit_tokens == 8


@pytest.mark.parametrize(
    ("updates", "demand"),
    [
        ((done(7, 1),), None),
        ((done(1, 11),), None),
        ((), more(7, 0)),
        ((), more(1, 11)),
        ((), more(1, 10, 0)),
        ((), new(1, PROMPT)),
    ],
)
def test_nonsense_is_a_bug_and_says_so(
    updates: tuple[UpdateRequestTokens, ...], demand: AllocateRequestBlocks | None
) -> None:
    steps = Steps()
    steps.plan(new(1, PROMPT))
    with pytest.raises(InvariantViolated, match="request"):
        steps.plan(*([demand] if demand else []), updates=updates)


def test_equal_messages_give_equal_states() -> None:
    snapshots = []
    for _ in range(2):
        steps = Steps()
        steps.plan(new(1, PROMPT), new(2, PROMPT))
        steps.plan(more(2, 10), updates=(done(1, 10), done(2, 10)), releases=(1,))
        snapshots.append(steps.allocator.snapshot())
    assert snapshots[0] == snapshots[1]


def test_what_a_match_pins_is_no_room() -> None:
    steps = Steps(4)
    steps.plan(new(1, PROMPT[:8]))
    steps.plan(new(2, (1, 2)), updates=(done(1, 8),), releases=(1,))  # 2 cached, 1 referenced, 1 free
    answer = steps.plan(new(3, (*PROMPT[:8], 1, 2, 3, 4, 5)))
    assert [(r.request_id, r.reason) for r in answer.refusals] == [(3, "no_room")]
    assert steps.plan(new(3, (*PROMPT[:8], 1, 2, 3, 4))).grants[0].start == 8
