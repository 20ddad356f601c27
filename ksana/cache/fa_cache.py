"""The full-attention side of planning: requests, their block tables, the FA pool and the prefix tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypedDict

import msgspec

from ksana.cache.block_pool import BlockAllocatorGroupInterface, BlockPool, PoolSnapshot
from ksana.cache.cache_config import CacheConfig, ceil_div
from ksana.cache.cached_request import CachedRequest
from ksana.cache.fa_checks import check_all, check_requests
from ksana.cache.filled_blocks import FilledBlocks
from ksana.cache.loading_request import LoadingRequest
from ksana.cache.prefix_tree import TOKEN_BYTES, Parent, PrefixTree, TreeSnapshot, token_bytes
from ksana.errors import InvariantViolated
from ksana.messages.base import RequestId, StepId
from ksana.messages.blocks import (
    AllocateRequestBlocks,
    BlockTableEdit,
    CacheCounters,
    NewRequestBlocks,
    UpdateRequestTokens,
)
from ksana.messages.remote import FilledBlock
from ksana.messages.swa import FaBlock

Reason = Literal["no_room", "budget", "behind", "never", "loading"]


class CacheTotals(msgspec.Struct):
    """What is counted from start to end, whatever happens to the pools."""

    num_queried_tokens: int = 0
    num_fa_hit_tokens: int = 0
    num_hit_tokens: int = 0
    num_remote_hit_tokens: int = 0
    num_fa_evictions: int = 0
    num_swa_evictions: int = 0

    def as_message(self) -> CacheCounters:
        return CacheCounters(**msgspec.structs.asdict(self))


class Taken(msgspec.Struct, gc=False):
    """FA blocks taken for one demand, until it is settled."""

    request: CachedRequest
    demand: AllocateRequestBlocks
    is_new: bool
    start: int
    num_tokens: int
    first_index: int
    """Table places from here on are new to the request: matched blocks, then fresh ones."""
    num_before: int
    """Length of the table before: what a refusal leaves."""


class FaSnapshot(TypedDict):
    """An FaCache as plain values."""

    pool: PoolSnapshot
    tree: TreeSnapshot
    requests: list[CachedRequest]
    loads: list[LoadingRequest]
    holds: dict[int, list[int]]
    hold_counts: dict[int, int]
    filled: list[FilledBlock]
    filled_if_fixed: list[int]
    evicted: list[FaBlock]


class FaCache:
    """Requests and FA blocks.

    Invariants: every block in a table is referenced; `num_set_aside` is the sum over requests and loads; each
    load is a holder of its blocks, and all holds together are one of what they name and what is before it.
    Cost: about 1 µs per matched block, O(log n) per evicted one; a decode that needs no block is O(1).
    """

    def __init__(self, config: CacheConfig, totals: CacheTotals) -> None:
        self.config = config
        self.totals = totals
        self.pool: BlockAllocatorGroupInterface = BlockPool(config.num_fa_blocks)
        self.tree = PrefixTree(self.pool, config.block_size)
        self.requests: dict[RequestId, CachedRequest] = {}
        self.loads: dict[RequestId, LoadingRequest] = {}
        """See `remote_loading`. No request is in both."""
        self.holds: dict[int, list[int]] = {}
        """By hold id: the blocks that are written back. See `held_blocks`."""
        self.hold_counts: dict[int, int] = {}
        """By block id: holds that name it, and nodes right below it that are in here too. The pool counts one
        holder for each block in here."""
        self.num_set_aside = 0
        """Blocks that admission promised to requests, loading ones included, and that they have not taken."""
        self.filled = FilledBlocks(config)
        """Empty unless blocks are written back."""
        self.evicted: list[FaBlock] = []
        """Since the last `take_evicted`; only with sliding layers, which alone ask."""

    def step_done(self, step_id: StepId) -> None:
        """Every step up to this one is done: what only they named becomes idle."""
        self.tree.touch(self.pool.step_done(step_id))

    # What done steps have computed

    def update_request_tokens(
        self, update: UpdateRequestTokens
    ) -> tuple[CachedRequest, range, list[BlockTableEdit]]:
        """Take note of computed tokens; newly full blocks join the tree.

        Returns the request, the indices of the newly full blocks, and table edits caused by merges.
        """
        request = self._running(update.request_id, is_confirmed=False)
        request.tokens += token_bytes(update.token_ids)
        before, now = request.num_computed, update.num_computed_tokens
        if not before <= now <= min(request.num_planned, request.num_tokens):
            raise InvariantViolated(
                f"request {request.request_id}: {now} tokens computed after {before}, "
                f"{request.num_planned} planned, {request.num_tokens} known"
            )
        request.num_computed = now
        full = range(before // self.config.block_size, now // self.config.block_size)
        edits: list[BlockTableEdit] = []
        if self.config.enable_prefix_caching:
            for index in full:
                if index < request.num_cached_blocks:
                    if self.config.write_back and self.config.has_swa:
                        block = self.fa_block(request.fa_block_ids[index])
                        self.filled.offer_if_fixed(request, index, block)
                    continue
                edit = self.append_filled_cached_block(request, index)
                if edit is not None:
                    edits.append(edit)
        return request, full, edits

    def append_filled_cached_block(self, request: CachedRequest, index: int) -> BlockTableEdit | None:
        """A full block whose step is done joins the tree, or is given up for an equal one there (a merge).

        The request goes over to the equal block; its own is freed when no step in flight names it. It is not
        offered to the store: the equal one was, or comes from there and may be on its way to the device.
        """
        size = self.config.block_size * TOKEN_BYTES
        own = request.fa_block_ids[index]
        parent: Parent = request.fa_block_ids[index - 1] if index else request.cache_salt
        key = bytes(request.tokens[index * size : (index + 1) * size])
        request.num_cached_blocks = index + 1
        equal = self.tree.find(parent, key)
        if equal is None:
            self.tree.insert(parent, key, own)
            if self.config.write_back:
                self.filled.offer(request, index, self.fa_block(own))
            return None
        self.pool.share(equal)
        request.fa_block_ids[index] = equal
        self.pool.release((own,), request.last_step_id)
        return BlockTableEdit(index=index, block_id=equal)

    def release_request(self, request_id: RequestId) -> CachedRequest:
        """The request ended, was preempted, or gives up what a load has brought: its full blocks stay as
        cache, the rest becomes free."""
        request = self._running(request_id)
        del self.requests[request_id]
        self.num_set_aside -= request.num_set_aside
        self.tree.touch(self.pool.release(reversed(request.fa_block_ids), request.last_step_id))
        return request

    def _running(self, request_id: RequestId, *, is_confirmed: bool | None = None) -> CachedRequest:
        request = self.requests.get(request_id)
        if request is None or is_confirmed not in (None, request.is_confirmed):
            raise InvariantViolated(f"request {request_id} does not run, but is spoken of as if it did")
        return request

    def fa_block(self, block_id: int) -> FaBlock:
        """The present life of a block."""
        return FaBlock(fa_block_id=block_id, generation=self.pool.generation(block_id))

    def fa_blocks(self, block_ids: Sequence[int]) -> tuple[FaBlock, ...]:
        """The present lives of several blocks."""
        lives = zip(block_ids, self.pool.generations(block_ids), strict=True)
        return tuple([FaBlock(fa_block_id=block_id, generation=generation) for block_id, generation in lives])

    # What the next step needs

    def take_for_running(self, demand: AllocateRequestBlocks, budget: int) -> Taken | Reason:
        """Blocks for the next tokens of a running request, or why not. A refusal changes nothing."""
        request = self._running(demand.request_id, is_confirmed=False)
        start = demand.num_computed_tokens
        if demand.num_tokens < 1 or not request.num_computed <= start <= request.num_planned:
            raise InvariantViolated(
                f"request {request.request_id}: {demand.num_tokens} tokens wanted from {start}, "
                f"{request.num_computed} computed, {request.num_planned} planned"
            )
        num_tokens = min(demand.num_tokens, budget)
        if num_tokens < 1:
            return "budget"
        first_index = len(request.fa_block_ids)
        num_total = self.config.num_blocks_for(start + num_tokens)
        if num_total > first_index:
            if num_total > self.pool.num_blocks:
                return "never"
            if num_total - first_index > self.pool.num_free + self.pool.num_cached:
                return "no_room"
            self._grow(request, num_total - first_index)
        return Taken(request, demand, False, start, num_tokens, first_index, first_index)

    def take_for_new(
        self, demand: AllocateRequestBlocks, new: NewRequestBlocks, budget: int
    ) -> Taken | Reason:
        """Match a new request's tokens, pin what is found and take blocks for the tokens behind it.

        `num_tokens` assumes that the request starts where the FA hit ends; if its sliding layers start
        earlier, its tokens in this step end no later than that. A refusal here changes nothing; one by the
        sliding layers later gives back what was taken (`undo`), but what was evicted for it stays evicted.
        """
        num_total_tokens = len(new.token_ids)
        if demand.request_id in self.requests or demand.num_tokens < 1 or num_total_tokens < 1:
            raise InvariantViolated(f"request {demand.request_id} has blocks already, or asks for no tokens")
        config, pool = self.config, self.pool
        num_reserved = ceil_div(new.num_reserved_tokens, config.block_size)
        if max(num_reserved, self._num_blocks_at_most(new)) > pool.num_blocks:
            return "never"
        if budget < 1:
            return "budget"
        matched: list[int] = []
        tokens = bytearray(token_bytes(new.token_ids))
        if config.enable_prefix_caching:
            cap = (num_total_tokens - 1) // config.block_size
            matched = self.tree.match(new.cache_salt, tokens, cap)
        start = len(matched) * config.block_size
        num_tokens = min(demand.num_tokens, num_total_tokens - start, budget)
        num_fresh = config.num_blocks_for(start + num_tokens) - len(matched)
        num_idle = pool.num_free + pool.num_cached - pool.count_cached(matched)
        if max(num_fresh, num_reserved - len(matched)) > num_idle - self.num_set_aside:
            return "no_room"
        for block_id in matched:
            pool.share(block_id)
        request = CachedRequest(
            request_id=demand.request_id,
            cache_salt=new.cache_salt,
            tokens=tokens,
            fa_block_ids=matched,
            num_matched=len(matched),
            num_cached_blocks=len(matched),
            num_reserved_blocks=num_reserved,
            num_reserved_tokens=new.num_reserved_tokens,
        )
        self.requests[request.request_id] = request
        self.num_set_aside += request.num_set_aside
        self._grow(request, num_fresh)
        return Taken(request, demand, True, start, num_tokens, 0, 0)

    def _num_blocks_at_most(self, new: NewRequestBlocks) -> int:
        """What the request holds alone when it comes to its limit."""
        return self.config.num_blocks_for(max(len(new.token_ids), new.num_tokens_at_most))

    def take_for_confirmed(
        self, demand: AllocateRequestBlocks, new: NewRequestBlocks, budget: int
    ) -> Taken | Reason:
        """The first blocks of a request that a remote load has given a start. A refusal changes nothing."""
        request = self._running(demand.request_id, is_confirmed=True)
        if demand.num_tokens < 1 or len(new.token_ids) != request.num_tokens:
            raise InvariantViolated(
                f"request {request.request_id} was loaded for other tokens, or asks for none"
            )
        if self._num_blocks_at_most(new) > self.pool.num_blocks:
            return "never"
        if budget < 1:
            return "budget"
        start = request.num_matched * self.config.block_size
        num_tokens = min(demand.num_tokens, request.num_tokens - start, budget)
        num_before = len(request.fa_block_ids)
        num_fresh = max(0, self.config.num_blocks_for(start + num_tokens) - num_before)
        num_idle = self.pool.num_free + self.pool.num_cached
        if num_fresh > min(num_idle, request.num_set_aside + max(0, num_idle - self.num_set_aside)):
            return "no_room"
        self._grow(request, num_fresh)
        return Taken(request, demand, True, start, num_tokens, 0, num_before)

    def make_room(self, num_blocks: int) -> None:
        """Evict until so many blocks are free. The caller has made sure that there are enough."""
        shortage = num_blocks - self.pool.num_free
        if shortage > 0:
            evicted = self.tree.evict(shortage)
            if self.config.has_swa:
                self.evicted.extend(self.fa_blocks(evicted))
            self.totals.num_fa_evictions += shortage

    def _grow(self, request: CachedRequest, num_blocks: int) -> None:
        self.make_room(num_blocks)
        self.num_set_aside -= request.num_set_aside
        request.fa_block_ids.extend(self.pool.allocate(num_blocks))
        self.num_set_aside += request.num_set_aside

    def settle(self, taken: Taken, start: int, num_tokens: int, step_id: StepId) -> None:
        """The demand is granted, from `start` on. Blocks beyond what its tokens need go back."""
        request = taken.request
        request.last_step_id = step_id
        request.num_planned = start + num_tokens
        request.is_confirmed = False
        if taken.is_new:
            request.num_computed = start
            if taken.demand.new is not None and not taken.demand.new.resumed:
                self.totals.num_queried_tokens += request.num_tokens
                self.totals.num_fa_hit_tokens += request.num_matched * self.config.block_size
                self.totals.num_hit_tokens += start
                self.totals.num_remote_hit_tokens += request.num_remote_tokens
        if len(request.fa_block_ids) > taken.num_before:
            num_needed = max(self.config.num_blocks_for(start + num_tokens), request.num_matched)
            self._shrink(request, max(num_needed, taken.num_before))

    def undo(self, taken: Taken) -> None:
        """The sliding layers refuse the demand: give back what was taken, pins included. FA blocks that were
        evicted for it do not come back: they are free."""
        request = taken.request
        if not taken.is_new or request.is_confirmed:
            self._shrink(request, taken.num_before)
            return
        self._shrink(request, request.num_matched)
        del self.requests[request.request_id]
        self.num_set_aside -= request.num_set_aside
        self.tree.unpin(self.pool.release(reversed(request.fa_block_ids), 0))

    def _shrink(self, request: CachedRequest, num_blocks: int) -> None:
        """Give back fresh blocks at the end of the table, which no step has named."""
        surplus = request.fa_block_ids[num_blocks:]
        if surplus:
            self.num_set_aside -= request.num_set_aside
            del request.fa_block_ids[num_blocks:]
            self.pool.release(reversed(surplus), 0)
            self.num_set_aside += request.num_set_aside

    def take_evicted(self) -> tuple[FaBlock, ...]:
        """The FA blocks evicted since the last call."""
        evicted = tuple(self.evicted)
        self.evicted.clear()
        return evicted

    def check(self, request_ids: Iterable[RequestId] | None = None) -> None:
        """The invariants of these requests, O(their blocks); of everything, O(pool), if None."""
        check_requests(self, self.requests if request_ids is None else request_ids)
        if request_ids is None:
            check_all(self)
        else:
            self.pool.check_sums()

    def snapshot(self) -> FaSnapshot:
        """The whole state as plain values, which later changes do not touch."""
        filled, filled_if_fixed = self.filled.snapshot()
        return {
            "pool": self.pool.snapshot(),
            "tree": self.tree.snapshot(),
            "requests": [request.copy() for request in self.requests.values()],
            "loads": [load.copy() for load in self.loads.values()],
            "holds": {hold_id: list(block_ids) for hold_id, block_ids in self.holds.items()},
            "hold_counts": dict(self.hold_counts),
            "filled": filled,
            "filled_if_fixed": filled_if_fixed,
            "evicted": list(self.evicted),
        }

    def restore(self, snapshot: FaSnapshot) -> None:
        """Go on from a snapshot. Raises InvariantViolated for one that could not have been taken here."""
        self.pool.restore(snapshot["pool"])
        self.tree.restore(snapshot["tree"])
        self.requests = {request.request_id: request.copy() for request in snapshot["requests"]}
        self.loads = {load.request_id: load.copy() for load in snapshot["loads"]}
        self.holds = {hold_id: list(block_ids) for hold_id, block_ids in snapshot["holds"].items()}
        self.hold_counts = dict(snapshot["hold_counts"])
        self.num_set_aside = sum(r.num_set_aside for r in self.requests.values())
        self.num_set_aside += sum(load.num_set_aside for load in self.loads.values())
        self.filled.restore(snapshot["filled"], snapshot["filled_if_fixed"])
        self.evicted = list(snapshot["evicted"])
        self.check()
