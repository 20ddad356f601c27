"""Remote loading and holds without sliding layers: the calls of the loader, one by one."""

from __future__ import annotations

from typing import Any

import pytest

from ksana.cache.block_allocator import BlockAllocator
from ksana.cache.cache_config import CacheConfig
from ksana.cache.chain_keys import chain_keys, root_key
from ksana.cache.prefix_tree import token_bytes
from ksana.errors import InvariantViolated
from ksana.messages.base import Message
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
from ksana.messages.remote import (
    AllocateBlocksForRemoteCache,
    BlocksFilled,
    BlocksHeld,
    ConfirmRemoteCacheLoadingResult,
    DropRemoteCacheLoading,
    GetRequestPrefixBlockNumberBeforeRemoteCacheLoading,
    HoldBlocks,
    PrefixBlockNumber,
    ReleaseHeldBlocks,
    RemoteBlocksAllocated,
    RemoteCallRefused,
    RemoteLoadingConfirmed,
)
from ksana.messages.swa import FaBlock

SIZE = 4
PROMPT = tuple(range(100, 130))
"""Seven full blocks and two tokens."""


class Loads:
    """An allocator, a scheduler's steps and a loader's calls; the step before is always done."""

    def __init__(self, num_blocks: int = 20, **rest: Any) -> None:
        self.allocator = BlockAllocator(CacheConfig(block_size=SIZE, num_fa_blocks=num_blocks, **rest))
        self.step_id = 0
        self.filled: list[BlocksFilled] = []

    def plan(
        self,
        *demands: AllocateRequestBlocks,
        updates: tuple[UpdateRequestTokens, ...] = (),
        releases: tuple[int, ...] = (),
    ) -> BlocksPlanned:
        self.step_id += 1
        plan = PlanBlocks(
            pool_epoch=1,
            step_id=self.step_id,
            done_step_id=self.step_id - 1,
            token_budget=1000,
            updates=updates,
            releases=tuple(ReleaseRequest(request_id=r) for r in releases),
            demands=demands,
        )
        [(_, answer), *rest] = self.allocator.handle(0.0, [plan])
        self.allocator.check()
        assert isinstance(answer, BlocksPlanned)
        for address, message in rest:
            assert address == "remote_cache_loader"
            assert isinstance(message, BlocksFilled)
            self.filled.append(message)
        return answer

    def run(self, request_id: int, tokens: tuple[int, ...]) -> None:
        """Compute the tokens and leave them as cache."""
        [grant] = self.plan(new(request_id, tokens)).grants
        done = UpdateRequestTokens(
            request_id=request_id, token_ids=(), num_computed_tokens=grant.start + grant.num_tokens
        )
        self.plan(updates=(done,), releases=(request_id,))

    def call(self, message: Message) -> Any:
        said = self.allocator.handle(0.0, [message])
        self.allocator.check()
        assert len(said) < 2
        return said[0][1] if said else None

    def refused(self, message: Message, match: str) -> RemoteCallRefused:
        self.call(drop(99))  # tells a new allocator its epoch
        before = self.allocator.snapshot()
        answer = self.call(message)
        assert isinstance(answer, RemoteCallRefused)
        assert match in answer.detail
        assert answer.call == type(message).__name__
        assert self.allocator.snapshot() == before
        return answer

    def num_cached(self, tokens: tuple[int, ...], salt: str = "") -> int:
        return len(self.allocator.fa.tree.match(salt, token_bytes(tokens), 99))

    def num_held(self) -> int:
        return self.allocator.fa.pool.use().num_held


def new(request_id: int, tokens: tuple[int, ...], *, num_tokens: int | None = None) -> AllocateRequestBlocks:
    return AllocateRequestBlocks(
        request_id=request_id,
        num_computed_tokens=0,
        num_tokens=num_tokens or len(tokens),
        new=NewRequestBlocks(token_ids=tokens, num_reserved_tokens=len(tokens)),
    )


def probe(request_id: int, tokens: tuple[int, ...] = PROMPT, *, reserved: int = 0) -> Message:
    return GetRequestPrefixBlockNumberBeforeRemoteCacheLoading(
        pool_epoch=1, request_id=request_id, token_ids=tokens, cache_salt="", num_reserved_tokens=reserved
    )


def allocate(request_id: int, fa_block_num: int, swa_block_num: int = 0) -> Message:
    return AllocateBlocksForRemoteCache(
        pool_epoch=1, request_id=request_id, fa_block_num=fa_block_num, swa_block_num=swa_block_num
    )


def confirm(request_id: int, matched: int, slots: tuple[int, ...] = (), reserved: int = 0) -> Message:
    return ConfirmRemoteCacheLoadingResult(
        pool_epoch=1,
        request_id=request_id,
        matched_block_index=matched,
        matched_remote_swa_block_indexs=slots,
        reserved_block_num=reserved,
    )


def drop(request_id: int) -> Message:
    return DropRemoteCacheLoading(pool_epoch=1, request_id=request_id)


def table(grant: BlocksGranted) -> list[int]:
    return [edit.block_id for edit in grant.fa_edits]


def test_a_loaded_prefix_is_shared_and_the_request_goes_on_from_it() -> None:
    loads = Loads()
    loads.run(1, PROMPT[:9])
    probed = loads.call(probe(2))
    assert (probed.fa_block_num, probed.swa_block_num, probed.swa_valid) == (2, 2, ())
    reserved = loads.call(allocate(2, 5))
    assert isinstance(reserved, RemoteBlocksAllocated)
    assert (len(reserved.fa_block_ids), reserved.swa_block_ids) == (5, ())
    assert loads.num_held() == 7
    assert loads.num_cached(PROMPT) == 2, "blocks are invisible before they are confirmed"
    confirmed = loads.call(confirm(2, 6, reserved=1))
    assert (confirmed.cached_blocks, confirmed.num_remote_blocks) == (6, 4)
    assert loads.num_held() == 0
    assert loads.num_cached(PROMPT) == 6
    answer = loads.plan(new(2, PROMPT), new(3, PROMPT))
    first, second = answer.grants
    assert (first.start, first.num_tokens, first.fa_write_start) == (24, 6, 24)
    assert table(first)[2:7] == list(reserved.fa_block_ids), "block 6 was kept, unfilled"
    assert table(second)[:6] == table(first)[:6]
    assert answer.counters.num_queried_tokens == 9 + 30 + 30
    assert (answer.counters.num_hit_tokens, answer.counters.num_remote_hit_tokens) == (48, 16)


def test_the_state_says_which_calls_are_legal() -> None:
    loads = Loads()
    for call in (allocate(1, 0), confirm(1, 0)):
        assert loads.refused(call, "not loading").reason == "wrong_state"
    loads.call(probe(1))
    assert loads.refused(probe(1), "loading already").reason == "wrong_state"
    loads.call(allocate(1, 0))
    assert loads.refused(allocate(1, 0), "allocated already").reason == "wrong_state"
    assert loads.refused(probe(1), "loading already").reason == "wrong_state"
    loads.call(confirm(1, 0))
    for call, match in ((confirm(1, 0), "not loading"), (probe(1), "has blocks")):
        assert loads.refused(call, match).reason == "wrong_state"
    loads.plan(new(1, PROMPT))
    assert loads.refused(probe(1), "has blocks").reason == "wrong_state"
    assert Loads(enable_prefix_caching=False).refused(probe(1), "off").reason == "wrong_state"


def test_arguments_outside_their_bounds_change_nothing() -> None:
    loads = Loads()
    loads.run(1, PROMPT[:9])
    assert loads.refused(probe(2, ()), "0 tokens").reason == "bad_arguments"
    loads.call(probe(2))
    for num_fa, num_swa in ((-1, 0), (7, 0), (1, 1), (1, -1)):
        assert loads.refused(allocate(2, num_fa, num_swa), "blocks").reason == "bad_arguments"
    for call in (
        confirm(2, 1),
        confirm(2, 3),
        confirm(2, 2, (-1,)),
        confirm(2, 2, (), 1),
        confirm(2, 2, (), -1),
    ):
        assert loads.refused(call, "").reason == "bad_arguments"
    loads.call(allocate(2, 6))  # up to the block of the token after the prompt
    for call in (confirm(2, 1), confirm(2, 8), confirm(2, 4, (), 5), confirm(2, 4, (3,))):
        assert loads.refused(call, "").reason == "bad_arguments"
    assert loads.call(confirm(2, 7, (), 1)).cached_blocks == 7


def test_blocks_kept_unfilled_stay_with_a_request_that_begins_with_a_small_chunk() -> None:
    loads = Loads()
    loads.call(probe(1))
    reserved = loads.call(allocate(1, 7)).fa_block_ids
    loads.call(confirm(1, 2, reserved=5))
    [grant] = loads.plan(new(1, PROMPT, num_tokens=3)).grants
    assert (grant.start, grant.num_tokens, table(grant)) == (8, 3, list(reserved))


def test_nothing_remote() -> None:
    loads = Loads()
    loads.run(1, PROMPT[:9])
    loads.call(probe(2))
    assert loads.call(confirm(2, 2)).cached_blocks == 2
    [grant] = loads.plan(new(2, PROMPT)).grants
    assert grant.start == 8


def test_the_last_token_is_computed_even_if_everything_is_there() -> None:
    loads = Loads()
    loads.run(1, PROMPT)
    assert loads.call(probe(2, PROMPT[:28])).fa_block_num == 6
    assert loads.call(allocate(2, 1)).fa_block_ids
    assert loads.refused(confirm(2, 7), "no token to compute").reason == "bad_arguments"


def test_a_sibling_that_appeared_meanwhile_survives() -> None:
    loads = Loads()
    loads.call(probe(2))
    reserved = loads.call(allocate(2, 7)).fa_block_ids
    loads.run(1, PROMPT[:13])
    path = loads.allocator.fa.tree.match("", token_bytes(PROMPT), 9)
    confirmed = loads.call(confirm(2, 5, reserved=2))
    assert (confirmed.cached_blocks, confirmed.num_remote_blocks) == (5, 2)
    merged = loads.allocator.fa.tree.match("", token_bytes(PROMPT), 9)
    assert merged == [*path, *reserved[3:5]]
    [grant] = loads.plan(new(2, PROMPT)).grants
    assert table(grant) == [*merged, *reserved[5:], *table(grant)[7:]]


@pytest.mark.parametrize("state", ["probed", "allocated", "confirmed"])
def test_drop_gives_everything_back(state: str) -> None:
    loads = Loads()
    loads.run(1, PROMPT[:9])
    loads.call(probe(2))
    if state != "probed":
        loads.call(allocate(2, 5))
    if state == "confirmed":
        loads.call(confirm(2, 4, (), 2))
    assert loads.call(drop(2)) is None
    use = loads.allocator.fa.pool.use()
    assert (use.num_held, use.num_referenced) == (0, 0)
    assert loads.num_cached(PROMPT) == (4 if state == "confirmed" else 2)
    assert loads.allocator.fa.num_set_aside == 0
    assert loads.call(drop(2)) is None, "a second one, and one without a load, mean nothing"
    assert loads.plan(new(2, PROMPT)).grants[0].start == (16 if state == "confirmed" else 8)
    assert loads.call(drop(2)) is None, "a running request is not a load"
    assert loads.allocator.fa.pool.use().num_referenced


def test_a_confirmed_request_can_be_released_and_matched_again() -> None:
    loads = Loads()
    loads.call(probe(2))
    loads.call(allocate(2, 5))
    loads.call(confirm(2, 5, (), 0))
    loads.plan(releases=(2,))
    answer = loads.plan(new(2, PROMPT))
    assert answer.grants[0].start == 20
    assert (answer.counters.num_queried_tokens, answer.counters.num_hit_tokens) == (30, 20)


def test_loading_starts_only_if_the_whole_request_finds_room() -> None:
    loads = Loads(8)
    assert loads.refused(probe(1, reserved=33), "9 FA blocks needed").reason == "no_room"
    loads.call(probe(1))  # all eight
    assert loads.refused(probe(2, PROMPT[:3]), "room for 0").reason == "no_room"
    assert [r.reason for r in loads.plan(new(3, PROMPT[:3])).refusals] == ["no_room"]
    loads.call(allocate(1, 3))
    assert loads.refused(probe(2, PROMPT[:3]), "room for 0").reason == "no_room"
    loads.call(confirm(1, 3))
    assert loads.refused(probe(2, PROMPT[:3]), "room for 0").reason == "no_room"
    assert len(loads.plan(new(1, PROMPT)).grants) == 1


def test_running_requests_may_leave_a_load_without_room() -> None:
    """They go first; the load stays probed and can be confirmed as it is, or dropped."""
    loads = Loads(9)
    loads.run(9, PROMPT[:4])
    loads.plan(new(1, (1, 2, 3)))
    loads.call(probe(2))
    loads.plan(AllocateRequestBlocks(request_id=1, num_computed_tokens=3, num_tokens=20))
    assert loads.refused(allocate(2, 6), "6 FA blocks needed, room for 2").reason == "no_room"
    assert loads.allocator.fa.loads[2].is_remote_loading_block_allocated is False
    assert loads.call(allocate(2, 2)).fa_block_ids
    assert loads.call(confirm(2, 3)).cached_blocks == 3
    [refusal] = loads.plan(new(2, PROMPT)).refusals
    assert refusal.reason == "no_room"
    loads.plan(releases=(1,))
    assert loads.plan(new(2, PROMPT)).grants[0].start == 12


def test_reserving_evicts_the_least_recently_used_and_never_a_pinned_one() -> None:
    loads = Loads(10)
    loads.run(1, PROMPT[:9])
    loads.run(2, tuple(range(20)))
    loads.call(probe(3))
    loads.call(allocate(3, 5))
    assert loads.num_cached(PROMPT) == 2
    assert loads.num_cached(tuple(range(20))) == 3
    assert loads.plan().counters.num_fa_evictions == 2


def test_a_loading_request_is_neither_planned_nor_updated() -> None:
    loads = Loads()
    loads.call(probe(1))
    before = loads.allocator.snapshot()["fa"]["loads"]
    update = UpdateRequestTokens(request_id=1, token_ids=(5,), num_computed_tokens=1)
    answer = loads.plan(new(1, PROMPT), new(2, PROMPT[:5]), updates=(update,))
    assert [(r.request_id, r.reason) for r in answer.refusals] == [(1, "loading"), (1, "loading")]
    assert [grant.request_id for grant in answer.grants] == [2]
    assert loads.allocator.snapshot()["fa"]["loads"] == before


def test_a_confirmed_request_that_is_planned_as_running_is_a_bug() -> None:
    loads = Loads()
    loads.call(probe(1))
    loads.call(confirm(1, 0))
    with pytest.raises(InvariantViolated, match="does not run"):
        loads.plan(AllocateRequestBlocks(request_id=1, num_computed_tokens=0, num_tokens=1))


def test_a_confirmed_request_comes_for_the_tokens_it_was_loaded_for() -> None:
    loads = Loads()
    loads.call(probe(1))
    loads.call(confirm(1, 0))
    with pytest.raises(InvariantViolated, match="other tokens"):
        loads.plan(new(1, (*PROMPT, 1)))


def test_pins_outlive_the_request_that_made_the_blocks() -> None:
    """A node that was never idle has no place in the eviction order; after the load it must get one."""
    loads = Loads(12)
    loads.plan(new(1, PROMPT[:13]))
    loads.plan(updates=(UpdateRequestTokens(request_id=1, token_ids=(), num_computed_tokens=13),))
    loads.call(probe(2, PROMPT[:9]))
    loads.plan(releases=(1,))
    loads.call(drop(2))
    loads.run(3, tuple(range(46)))
    assert loads.num_cached(PROMPT) == 0


def test_reset_answers_stale_calls_and_empties_everything() -> None:
    loads = Loads()
    loads.call(probe(1))
    loads.call(allocate(1, 3))
    loads.call(probe(2, PROMPT[:5]))
    loads.call(confirm(2, 0))
    loads.call(HoldBlocks(pool_epoch=1, hold_id=1, blocks=()))
    assert loads.allocator.handle(0.0, [ResetPools(pool_epoch=2)]) == []
    loads.allocator.check()
    assert loads.allocator.fa.pool.num_free == 20
    for call in (probe(3), allocate(1, 1), confirm(1, 0)):
        assert loads.refused(call, "reset").reason == "wrong_state"
    assert loads.call(drop(1)) is None
    assert loads.call(ReleaseHeldBlocks(pool_epoch=1, hold_id=1)) is None
    held = loads.call(HoldBlocks(pool_epoch=1, hold_id=2, blocks=(FaBlock(fa_block_id=0, generation=1),)))
    assert held == BlocksHeld(pool_epoch=1, hold_id=2, held=())
    with pytest.raises(InvariantViolated, match="epoch 3 in epoch 2"):
        loads.call(DropRemoteCacheLoading(pool_epoch=3, request_id=1))


def test_the_first_message_may_be_a_call() -> None:
    loads = Loads()
    assert isinstance(loads.call(probe(1)), PrefixBlockNumber)
    assert isinstance(loads.call(confirm(1, 0)), RemoteLoadingConfirmed)


# Writing back


def test_blocks_that_were_computed_are_offered_once() -> None:
    loads = Loads(write_back=True, chain_identity=b"model")
    loads.run(1, PROMPT)
    [filled] = loads.filled
    assert [block.index for block in filled.blocks] == list(range(7))
    assert [block.chain_key for block in filled.blocks] == chain_keys(root_key(b"model", ""), PROMPT, SIZE)
    path = loads.allocator.fa.tree.match("", token_bytes(PROMPT), 9)
    assert [block.block.fa_block_id for block in filled.blocks] == path


def test_neither_loaded_nor_merged_blocks_are_offered() -> None:
    loads = Loads(write_back=True)
    loads.call(probe(1))
    loads.call(allocate(1, 3))
    loads.call(confirm(1, 3))
    loads.plan(new(1, PROMPT))
    loads.plan(new(2, (*PROMPT, 7, 8)))  # computes blocks 3 to 7 beside the first
    done = tuple(
        UpdateRequestTokens(request_id=r, token_ids=(), num_computed_tokens=n) for r, n in ((1, 30), (2, 32))
    )
    loads.plan(updates=done)
    [filled] = loads.filled
    assert [block.index for block in filled.blocks] == [3, 4, 5, 6, 7]
    keys = chain_keys(root_key(b"", ""), (*PROMPT, 7, 8), SIZE)
    assert [block.chain_key for block in filled.blocks] == keys[3:]


def test_nothing_is_offered_without_write_back() -> None:
    loads = Loads()
    loads.run(1, PROMPT)
    assert not loads.filled


def test_held_blocks_stay_until_they_are_let_go() -> None:
    loads = Loads(10, write_back=True)
    loads.run(1, PROMPT[:17])
    blocks = [filled.block for filled in loads.filled[0].blocks]
    gone = FaBlock(fa_block_id=9, generation=1)
    other_life = FaBlock(fa_block_id=blocks[0].fa_block_id, generation=99)
    call = HoldBlocks(pool_epoch=1, hold_id=5, blocks=(blocks[2], gone, blocks[1], other_life, blocks[2]))
    answer = loads.call(call)
    assert [(held.block, held.swa_block_id) for held in answer.held] == [(blocks[2], -1), (blocks[1], -1)]
    assert loads.num_held() == 3, "what stands before them is held too"
    loads.run(2, tuple(range(27)))
    assert loads.num_cached(PROMPT) == 3
    assert [r.reason for r in loads.plan(new(3, tuple(range(50, 82)))).refusals] == ["no_room"]
    loads.call(ReleaseHeldBlocks(pool_epoch=1, hold_id=5))
    assert loads.num_held() == 0
    assert len(loads.plan(new(3, tuple(range(50, 82)))).grants) == 1


def test_holds_overlap() -> None:
    loads = Loads(10, write_back=True)
    loads.run(1, PROMPT[:17])
    blocks = [filled.block for filled in loads.filled[0].blocks]
    for hold_id, block in enumerate((blocks[1], blocks[3])):
        loads.call(HoldBlocks(pool_epoch=1, hold_id=hold_id, blocks=(block,)))
    loads.call(ReleaseHeldBlocks(pool_epoch=1, hold_id=1))
    assert loads.num_held() == 2
    with pytest.raises(InvariantViolated, match="no hold 1"):
        loads.call(ReleaseHeldBlocks(pool_epoch=1, hold_id=1))
    with pytest.raises(InvariantViolated, match="hold 0 is there"):
        loads.call(HoldBlocks(pool_epoch=1, hold_id=0, blocks=()))


def test_evictions_are_not_remembered_where_nobody_asks_for_them() -> None:
    loads = Loads(8)
    for request_id in range(5):
        loads.run(request_id, tuple(range(100 * request_id, 100 * request_id + 24)))
    assert loads.allocator.totals.num_fa_evictions > 0
    assert loads.allocator.fa.evicted == []


def test_holds_of_a_long_chain_cost_what_they_name() -> None:
    """Two batches in flight, as the loader has them: no ancestor is walked to again."""
    loads = Loads(210, write_back=True)
    loads.run(1, tuple(range(800)))
    blocks = [filled.block for filled in loads.filled[0].blocks]
    tree, walked = loads.allocator.fa.tree, 0
    parent = tree.parent

    def counted(block_id: int) -> int | str:
        nonlocal walked
        walked += 1
        return parent(block_id)

    tree.parent = counted  # type: ignore[method-assign]
    for number, first in enumerate(range(0, 200, 8)):
        call = HoldBlocks(pool_epoch=1, hold_id=number, blocks=tuple(blocks[first : first + 8]))
        loads.allocator.handle(0.0, [call])
        if number:
            loads.allocator.handle(0.0, [ReleaseHeldBlocks(pool_epoch=1, hold_id=number - 1)])
            assert loads.num_held() == min(200, first + 8)
    assert walked <= 200
    loads.call(ReleaseHeldBlocks(pool_epoch=1, hold_id=24))
    assert loads.num_held() == 0


def test_holds_that_fork_end_in_any_order() -> None:
    loads = Loads(20, write_back=True)
    loads.run(1, PROMPT[:17])
    loads.run(2, (*PROMPT[:8], *range(9)))
    [first, second] = [[filled.block for filled in told.blocks] for told in loads.filled]
    for hold_id, block in enumerate((first[3], first[1], second[1], second[1])):
        loads.call(HoldBlocks(pool_epoch=1, hold_id=hold_id, blocks=(block,)))
    num_held = []
    for hold_id in (0, 2, 1, 3):
        loads.call(ReleaseHeldBlocks(pool_epoch=1, hold_id=hold_id))
        num_held.append(loads.num_held())
    assert num_held == [4, 4, 4, 0]
