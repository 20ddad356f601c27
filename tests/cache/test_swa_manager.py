"""Block allocator and SWA cache manager, batch by batch; with the life example of the specification."""

from __future__ import annotations

from typing import Any

import pytest

from ksana.cache.block_allocator import BlockAllocator
from ksana.cache.cache_config import CacheConfig
from ksana.cache.invariants import check_together
from ksana.cache.prefix_tree import token_bytes
from ksana.cache.swa_manager import SWACacheManager
from ksana.errors import InvariantViolated
from ksana.messages.base import Message
from ksana.messages.blocks import (
    NO_BLOCK,
    AllocateRequestBlocks,
    BlocksPlanned,
    BlockTableEdit,
    NewRequestBlocks,
    PlanBlocks,
    ReleaseRequest,
    ResetPools,
    UpdateRequestTokens,
)
from ksana.messages.swa import FaBlock, SwaBatch, SwaBatchDone


class Pair:
    """Both cores, and a step counter; the step before is done unless `lag` says otherwise."""

    def __init__(
        self, *, window: int = 64, block_size: int = 16, num_fa: int = 100, num_swa: int = 8, **rest: Any
    ):
        self.config = CacheConfig(
            block_size=block_size,
            num_fa_blocks=num_fa,
            num_swa_blocks=num_swa,
            sliding_window=window,
            **{"plan_ahead": False, **rest},
        )
        self.allocator = BlockAllocator(self.config)
        self.manager = SWACacheManager(self.config)
        self.step_id = 0
        self.batches: list[SwaBatch] = []

    def ask(self, *demands: AllocateRequestBlocks, lag: int = 1, **rest: Any) -> list[tuple[str, Message]]:
        self.step_id += 1
        rest["releases"] = tuple(ReleaseRequest(request_id=r) for r in rest.get("releases", ()))
        done_step_id = max(0, self.step_id - lag)
        plan = PlanBlocks(
            pool_epoch=1,
            step_id=self.step_id,
            done_step_id=done_step_id,
            demands=demands,
            **{"token_budget": 1000, **rest},
        )
        return list(self.allocator.handle(0.0, [plan]))

    def plan(self, *demands: AllocateRequestBlocks, lag: int = 1, **rest: Any) -> BlocksPlanned:
        [(address, message)] = self.ask(*demands, lag=lag, **rest)
        if address == "swa_cache_manager":
            assert isinstance(message, SwaBatch)
            self.batches.append(message)
            [(_, done)] = self.manager.handle(0.0, [message])
            [(address, message)] = self.allocator.handle(0.0, [done])
        assert address == "scheduler"
        assert isinstance(message, BlocksPlanned)
        check_together(self.allocator, self.manager)
        return message

    def prefill(self, request_id: int, tokens: tuple[int, ...], chunk: int) -> None:
        """Compute a whole prompt chunk by chunk, each step done before the next is planned."""
        computed = self.plan(new(request_id, tokens, chunk)).grants[0].num_tokens
        while computed < len(tokens):
            [grant] = self.plan(
                more(request_id, computed, min(chunk, len(tokens) - computed)),
                updates=(done(request_id, computed),),
            ).grants
            computed += grant.num_tokens
        self.plan(updates=(done(request_id, computed),))

    def valid(self, tokens: tuple[int, ...]) -> str:
        """Valid bits along the cached path of these tokens."""
        fa = self.allocator.fa
        path = fa.tree.match("", token_bytes(tokens), len(tokens) // self.config.block_size)
        blocks = [FaBlock(fa_block_id=b, generation=fa.pool.generation(b)) for b in path]
        return "".join("01"[self.manager.cache.is_valid(block)] for block in blocks)

    def hits(self, tokens: tuple[int, ...]) -> list[int]:
        path = self.allocator.fa.tree.match("", token_bytes(tokens), len(tokens) // self.config.block_size)
        return [self.manager.cache.entry(b).hit_count if b in self._fixed() else -1 for b in path]

    def _fixed(self) -> set[int]:
        return {entry.fa_block_id for entry in self.manager.cache.fixed_entries()}


def new(
    request_id: int,
    tokens: tuple[int, ...],
    num_tokens: int | None = None,
    *,
    reserved: int = 0,
    resumed: bool = False,
) -> AllocateRequestBlocks:
    return AllocateRequestBlocks(
        request_id=request_id,
        num_computed_tokens=0,
        num_tokens=num_tokens or len(tokens),
        new=NewRequestBlocks(token_ids=tokens, num_reserved_tokens=reserved, resumed=resumed),
    )


def more(request_id: int, start: int, num_tokens: int = 1) -> AllocateRequestBlocks:
    return AllocateRequestBlocks(request_id=request_id, num_computed_tokens=start, num_tokens=num_tokens)


def done(request_id: int, computed: int, tokens: tuple[int, ...] = ()) -> UpdateRequestTokens:
    return UpdateRequestTokens(request_id=request_id, token_ids=tokens, num_computed_tokens=computed)


def indices(edits: tuple[BlockTableEdit, ...]) -> list[int]:
    return [edit.index for edit in edits]


PROMPT = tuple(range(1000, 1192))


@pytest.mark.parametrize("window_open_at_start", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "endpoint", "registered"),
    [(193, 12, range(8, 12)), (170, 10, range(6, 10)), (120, 0, range(0))],
)
def test_life_example(window_open_at_start: bool, num_tokens: int, endpoint: int, registered: range) -> None:
    """B=16, W=64, 8 SWA blocks, one prompt of 192 tokens computed block by block."""
    pair = Pair(window_open_at_start=window_open_at_start)
    pair.plan(new(1, PROMPT, 16))
    for block in range(1, 12):
        answer = pair.plan(more(1, 16 * block, 16), updates=(done(1, 16 * block),))
        assert answer.counters.num_swa_evictions == max(0, block - 7)
        if block == 8:
            assert answer.swa_use is not None
            assert answer.swa_use.num_referenced == 5  # 4 to 8 are the live window
            assert answer.swa_use.num_cached == 3
            assert pair.valid(PROMPT) == "0" + "1" * 7
    pair.plan(updates=(done(1, 192),), releases=(1,))
    assert pair.valid(PROMPT) == "0000" + "1" * 8

    [grant] = pair.plan(new(2, (*PROMPT, 7)[:num_tokens], 16)).grants
    assert grant.start == 16 * endpoint
    assert indices(grant.swa_edits)[: len(registered)] == list(registered)
    assert [b for b, hits in enumerate(pair.hits(PROMPT)) if hits == 1] == list(registered)


def test_endpoint_before_the_fa_hit_computes_again_but_writes_sliding_layers_only() -> None:
    """The local half of the specification's remote example: FA hit 5, valid bits 0 0 1 1 1, endpoint 0."""
    pair = Pair(num_swa=6)
    pair.prefill(1, PROMPT[:80], 16)
    pair.plan(releases=(1,))
    pair.prefill(9, tuple(range(48)), 16)
    pair.plan(releases=(9,))
    assert pair.valid(PROMPT[:80]) == "00111"
    answer = pair.plan(new(2, (*PROMPT[:80], 5), 40))
    [grant] = answer.grants
    assert (grant.start, grant.num_tokens, grant.fa_write_start) == (0, 40, 80)
    assert indices(grant.fa_edits) == [0, 1, 2, 3, 4]
    assert indices(grant.swa_edits) == [0, 1, 2]
    assert (answer.counters.num_fa_hit_tokens, answer.counters.num_hit_tokens) == (80, 0)
    [grant] = pair.plan(more(2, 40, 41), updates=(done(2, 40),)).grants
    assert (grant.start, grant.fa_write_start) == (40, 80)
    assert pair.valid(PROMPT[:80])[:2] == "11"
    pair.plan(updates=(done(2, 81),))
    assert pair.valid(PROMPT[:80]) == "11111"


def test_budget_counts_from_the_endpoint_in_order_of_demands() -> None:
    pair = Pair(num_swa=40)
    pair.prefill(1, PROMPT, 32)
    answer = pair.plan(new(2, (*PROMPT, 1)), new(3, tuple(range(50))), more(1, 192), token_budget=30)
    assert [(g.request_id, g.start, g.num_tokens) for g in answer.grants] == [(2, 192, 1), (3, 0, 29)]
    assert [(r.request_id, r.reason) for r in answer.refusals] == [(1, "budget")]


def test_places_outside_the_window_are_cleared_in_the_table() -> None:
    pair = Pair()
    pair.plan(new(1, PROMPT, 96))
    [edits] = pair.plan(more(1, 96, 16), updates=(done(1, 96),)).edits
    assert edits.fa_edits == ()
    assert edits.swa_edits == tuple(BlockTableEdit(index=i, block_id=NO_BLOCK) for i in (0, 1))


def test_equal_blocks_merge_in_both_pools() -> None:
    pair = Pair(num_swa=20)
    first, second = pair.plan(new(1, PROMPT[:40]), new(2, PROMPT[:40])).grants
    [edits] = pair.plan(updates=(done(1, 40), done(2, 40))).edits
    assert edits.request_id == 2
    assert edits.fa_edits == first.fa_edits[:2]
    assert edits.swa_edits == first.swa_edits[:2]
    assert set(first.swa_edits).isdisjoint(second.swa_edits)
    assert pair.manager.cache.pool.num_free == 20 - 4


def test_a_merged_request_brings_its_swa_block_to_an_fa_block_without_one() -> None:
    pair = Pair(num_swa=4, window=16)
    first, second = pair.plan(new(1, PROMPT[:48], 16), new(2, PROMPT[:48], 16)).grants
    for computed in (16, 32, 48):
        num_tokens = min(16, 49 - computed)
        pair.plan(more(1, computed, num_tokens), updates=(done(1, computed),))
    assert pair.valid(PROMPT[:48]) == "011"
    [edits] = pair.plan(updates=(done(2, 16),)).edits
    assert edits.fa_edits == first.fa_edits[:1]
    assert edits.swa_edits == ()
    assert pair.valid(PROMPT[:48]) == "111"
    [entry] = [e for e in pair.manager.cache.fixed_entries() if e.prefix_fa_block_num == 0]
    assert entry.swa_block_id == second.swa_edits[0].block_id
    assert entry.fa_block_id == first.fa_edits[0].block_id


def test_no_edits_for_a_request_that_is_released_in_the_same_batch() -> None:
    pair = Pair(num_swa=20)
    pair.plan(new(1, PROMPT[:100]), new(2, PROMPT[:100]))
    answer = pair.plan(
        new(2, (*PROMPT[:100], 1), resumed=True), updates=(done(1, 100), done(2, 100)), releases=(2,)
    )
    assert [edits.request_id for edits in answer.edits] == [1]
    assert answer.grants[0].start == 96


def test_a_refusal_for_want_of_swa_blocks_undoes_the_fa_part() -> None:
    pair = Pair(num_swa=9, num_fa=40)
    pair.prefill(1, PROMPT[:80], 80)
    pair.plan(new(3, tuple(range(64))))
    before = (pair.allocator.snapshot(), pair.manager.snapshot())
    answer = pair.plan(new(2, (*PROMPT[:64], *range(20)), 84), new(4, (1, 2)), more(1, 80, 40))
    assert [(r.request_id, r.reason) for r in answer.refusals] == [
        (2, "no_room"),
        (4, "behind"),
        (1, "no_room"),
    ]
    after = (pair.allocator.snapshot(), pair.manager.snapshot())
    for state in (*before, *after):
        for pool in (state.get("fa", {}).get("pool"), state.get("cache", {}).get("pool")):
            if pool is not None:
                del pool["done_step_id"]
                pool["free"].sort()
                pool["generations"] = None  # ids that were taken and given back have started a new life
    assert before == after


def test_running_requests_behind_a_refused_one_are_tried() -> None:
    pair = Pair(num_swa=8)
    pair.plan(new(1, PROMPT[:64]))
    answer = pair.plan(new(2, tuple(range(80))), more(1, 64))
    assert [(r.request_id, r.reason) for r in answer.refusals] == [(2, "no_room")]
    assert [grant.request_id for grant in answer.grants] == [1]


def test_admission_counts_the_swa_blocks_that_a_prompt_will_need() -> None:
    pair = Pair(num_swa=12, window=64)
    pair.plan(new(1, PROMPT, 16, reserved=192), token_budget=64)  # 1 block now, 4 + 4 + 1 in the end
    assert pair.plan(new(2, tuple(range(64)), reserved=64)).refusals[0].reason == "no_room"
    assert pair.plan(new(2, tuple(range(48)), reserved=48)).grants


def test_what_is_set_aside_is_free_again_when_the_prompt_is_computed() -> None:
    pair = Pair(num_swa=12)
    pair.plan(new(1, PROMPT[:64], 16, reserved=64), token_budget=64)
    assert pair.manager.tables.num_set_aside == 3
    pair.plan(more(1, 16, 48), updates=(done(1, 16),))
    assert pair.manager.tables.num_set_aside == 0


def test_hits_count_once_per_request() -> None:
    pair = Pair(num_swa=30)
    pair.prefill(1, PROMPT[:64], 64)
    pair.plan(new(2, PROMPT[:70]))
    assert pair.hits(PROMPT[:64]) == [1, 1, 1, 1]
    pair.plan(releases=(2,))
    pair.plan(new(2, PROMPT[:70], resumed=True))
    assert pair.hits(PROMPT[:64]) == [1, 1, 1, 1]
    pair.plan(new(3, PROMPT[:70]), new(4, PROMPT[:64]))
    assert pair.hits(PROMPT[:64]) == [3, 3, 3, 2]


def test_a_refused_match_counts_no_hit() -> None:
    pair = Pair(num_swa=8)
    pair.prefill(1, PROMPT[:64], 64)
    pair.plan(new(3, (1, 2)))
    assert pair.plan(new(2, (*PROMPT[:64], *range(60)))).refusals[0].reason == "no_room"
    assert pair.hits(PROMPT[:64]) == [0, 0, 0, 0]


def test_more_than_the_swa_pool_is_never() -> None:
    pair = Pair(num_swa=8)
    assert pair.plan(new(1, PROMPT)).refusals[0].reason == "never"


def test_steps_that_need_nothing_skip_the_hop() -> None:
    pair = Pair()
    pair.plan(new(1, PROMPT[:20]))
    pair.plan(more(1, 20), updates=(done(1, 20),))
    assert len(pair.batches) == 2
    for position in range(21, 30):
        pair.plan(more(1, position))
    assert len(pair.batches) == 2


def test_the_hop_is_not_skipped_while_blocks_wait_for_a_step() -> None:
    pair = Pair()
    pair.plan(new(1, PROMPT[:20]))
    answer = pair.plan(releases=(1,), lag=2)
    assert answer.swa_use is not None
    assert answer.swa_use.num_deferred == 2
    answer = pair.plan()
    assert answer.swa_use is not None
    assert answer.swa_use.num_free == 8


def test_an_evicted_fa_block_frees_its_swa_block_in_the_same_batch() -> None:
    pair = Pair(num_fa=6, num_swa=8)
    pair.prefill(1, PROMPT[:64], 64)
    pair.plan(releases=(1,))
    answer = pair.plan(new(2, tuple(range(70))))
    assert answer.counters.num_fa_evictions == 3
    assert answer.counters.num_swa_evictions == 0
    assert pair.valid(PROMPT[:64]) == "1"


def test_reset_voids_the_open_batch_and_its_late_answer_is_ignored() -> None:
    pair = Pair()
    [(_, batch)] = pair.ask(new(1, PROMPT[:20]))
    said = pair.allocator.handle(0.0, [ResetPools(pool_epoch=2)])
    assert [address for address, _ in said] == ["swa_cache_manager"]
    answers = pair.manager.handle(0.0, [batch, *(message for _, message in said)])
    assert [type(message) for _, message in answers] == [SwaBatchDone]
    assert pair.allocator.handle(0.0, [message for _, message in answers]) == []
    check_together(pair.allocator, pair.manager)
    assert pair.allocator.fa.pool.num_free == 100
    assert pair.manager.cache.pool.num_free == 8
    with pytest.raises(InvariantViolated, match="epoch 1 in epoch 2"):
        pair.manager.handle(0.0, [batch])


def test_a_second_batch_while_one_is_open_is_a_bug() -> None:
    pair = Pair()
    pair.ask(new(1, PROMPT[:20]))
    with pytest.raises(InvariantViolated, match="batch open: True"):
        pair.ask(new(2, PROMPT[:20]))


def test_an_answer_nobody_asked_for_is_a_bug() -> None:
    pair = Pair()
    [(_, batch)] = pair.ask(new(1, PROMPT[:20]))
    [(_, answer)] = pair.manager.handle(0.0, [batch])
    pair.allocator.handle(0.0, [answer])
    with pytest.raises(InvariantViolated, match="not asked"):
        pair.allocator.handle(0.0, [answer])


def test_caching_off_frees_what_leaves_the_window() -> None:
    pair = Pair(enable_prefix_caching=False, num_swa=12)
    pair.plan(new(1, PROMPT, 160))
    answer = pair.plan(more(1, 160, 32), updates=(done(1, 160),))
    assert answer.swa_use is not None
    assert (answer.swa_use.num_cached, answer.swa_use.num_referenced) == (0, 6)
    answer = pair.plan(releases=(1,))
    assert answer.swa_use is not None
    assert answer.swa_use.num_free == 12


def test_two_lives_of_an_fa_block_are_told_apart() -> None:
    pair = Pair()
    pair.prefill(1, PROMPT[:16], 16)
    [entry] = pair.manager.cache.fixed_entries()
    for step in (0, 1):
        block = FaBlock(fa_block_id=entry.fa_block_id, generation=entry.fa_generation + step)
        assert pair.manager.cache.is_valid(block) == (step == 0)


def test_checks_after_a_message_notice_a_lost_reference() -> None:
    pair = Pair()
    pair.plan(new(1, PROMPT[:20]))
    pair.allocator.check_touched()
    pair.manager.check_touched()
    pair.allocator.fa.pool.release(pair.allocator.fa.requests[1].fa_block_ids[:1], 0)
    with pytest.raises(InvariantViolated, match="not referenced"):
        pair.allocator.check_touched()
    pair.manager.cache.pool.release([pair.manager.tables.requests[1].entries[0].swa_block_id], 0)
    with pytest.raises(InvariantViolated, match="nobody owns"):
        pair.manager.check_touched()


def test_joint_check_notices_an_swa_block_that_hangs_elsewhere() -> None:
    pair = Pair()
    pair.prefill(1, PROMPT[:32], 32)
    [entry, _] = pair.manager.cache.fixed_entries()
    entry.fa_generation += 1
    with pytest.raises(InvariantViolated, match="earlier life"):
        check_together(pair.allocator, pair.manager)


def test_a_window_that_the_match_registers_is_no_room() -> None:
    pair = Pair(num_swa=8)
    pair.prefill(1, PROMPT[:64], 64)
    pair.plan(new(2, tuple(range(32))), releases=(1,))  # 4 reclaimable, 2 referenced, 2 idle
    answer = pair.plan(new(3, (*PROMPT[:64], *range(64))))
    assert [(r.request_id, r.reason) for r in answer.refusals] == [(3, "no_room")]
    [grant] = pair.plan(new(3, (*PROMPT[:64], *range(32)))).grants
    assert (grant.start, grant.num_tokens) == (64, 32)


def test_a_step_that_starts_before_the_fa_hit_ends_no_later_than_its_fa_blocks() -> None:
    pair = Pair(num_swa=6)
    pair.prefill(1, PROMPT[:80], 16)
    pair.plan(releases=(1,))
    pair.prefill(9, tuple(range(48)), 16)
    pair.plan(releases=(9,))
    [grant] = pair.plan(new(2, (*PROMPT[:80], 5), 90), token_budget=90).grants
    assert (grant.start, grant.num_tokens) == (0, 81)


@pytest.mark.parametrize(
    ("window", "num_tokens", "first"),
    [(64, 128, 4), (64, 127, 3), (64, 63, 0), (1, 16, 0), (1, 17, 1), (65, 128, 3), (65, 129, 4)],
)
def test_first_block_of_the_window(window: int, num_tokens: int, first: int) -> None:
    """The next token sees its previous W tokens: from num_tokens - W on."""
    assert Pair(window=window).config.first_window_block(num_tokens) == first
