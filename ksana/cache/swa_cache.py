"""SWA blocks as cache: entries by FA block, references, hits, eviction by value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import TypedDict

import msgspec

from ksana.cache.block_pool import BlockAllocatorGroupInterface, BlockPool, PoolSnapshot
from ksana.cache.cache_config import CacheConfig
from ksana.cache.swa_entry import SwaEntry, SwaEvictionQueue
from ksana.errors import InvariantViolated
from ksana.messages.base import StepId
from ksana.messages.swa import FaBlock, SwaFilled


class SwaCacheSnapshot(TypedDict):
    """An SwaCache as plain values. `queue` has SWA block ids in order of eviction."""

    pool: PoolSnapshot
    entries: list[SwaEntry]
    queue: list[int]
    queue_num_evictions: int
    queue_clock: int
    num_made: int
    num_evictions: int


class SwaCache:
    """The SWA pool and its entries.

    Invariants: an entry is reclaimable (waits for eviction) exactly when nobody references it and its
    content is fixed; a fixed entry is the only one of its FA block; an entry that is not fixed is owned by
    the request that writes it and freed with it; a block reserved for a load has no entry until it is bound.
    Cost: O(1) per block, O(log n) per block that becomes reclaimable or is evicted.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.pool: BlockAllocatorGroupInterface = BlockPool(config.num_swa_blocks)
        self.num_evictions = 0
        self._queue = SwaEvictionQueue(config.swa_eviction, config.num_swa_blocks)
        self._entries: dict[int, SwaEntry] = {}
        self._fixed: dict[int, SwaEntry] = {}
        self._num_made = 0

    # Questions

    @property
    def room(self) -> int:
        """Blocks that can be had: idle ones, and candidates for eviction."""
        return self.pool.num_free + self.pool.num_cached

    def is_valid(self, fa_block: FaBlock) -> bool:
        """Whether this very FA block has a content-fixed SWA block."""
        entry = self._fixed.get(fa_block.fa_block_id)
        return entry is not None and entry.fa_generation == fa_block.generation

    def valid(self, fa_blocks: Iterable[FaBlock]) -> list[bool]:
        """`is_valid` of each."""
        fixed = self._fixed
        return [
            (entry := fixed.get(block.fa_block_id)) is not None and entry.fa_generation == block.generation
            for block in fa_blocks
        ]

    def entry(self, fa_block_id: int) -> SwaEntry:
        """The content-fixed entry of an FA block that has one."""
        return self._fixed[fa_block_id]

    def has_entry(self, swa_block_id: int) -> bool:
        return swa_block_id in self._entries

    def is_reclaimable(self, fa_block_id: int) -> bool:
        return self.pool.is_cached(self._fixed[fa_block_id].swa_block_id)

    # References

    def set_reclaimable(self, fa_block_id: int, reclaimable: bool, until_step: StepId = 0) -> SwaEntry:
        """False adds a reference to the FA block's fixed entry; True drops one, once `until_step` is done."""
        entry = self._fixed[fa_block_id]
        if reclaimable:
            self.release((entry,), until_step)
            return entry
        if self.pool.is_cached(entry.swa_block_id):
            self._queue.remove(entry)
        self.pool.share(entry.swa_block_id)
        return entry

    def hold(self, fa_block_id: int) -> SwaEntry:
        """Keep the FA block's fixed entry from eviction until `unhold`."""
        entry = self._fixed[fa_block_id]
        if self.pool.is_cached(entry.swa_block_id):
            self._queue.remove(entry)
        self.pool.hold(entry.swa_block_id)
        return entry

    def unhold(self, entries: Sequence[SwaEntry]) -> None:
        """Drop one holder of each: they become reclaimable when nobody else counts on them."""
        self._reclaim(self.pool.unhold([entry.swa_block_id for entry in entries]))

    def increment_hit_count(self, fa_block_id: int) -> None:
        """One more request starts from this block. Only while it is referenced: its rank must not move."""
        self._queue.count_hit(self._fixed[fa_block_id])

    def release(self, entries: Sequence[SwaEntry], until_step: StepId) -> None:
        """Drop one reference of each: fixed ones become reclaimable, others free, when nobody is left and
        the last step that names them is done."""
        self._reclaim(self.pool.release([entry.swa_block_id for entry in entries], until_step))
        for entry in entries:
            if not entry.is_content_fixed and not self.pool.owner_count(entry.swa_block_id):
                del self._entries[entry.swa_block_id]

    def step_done(self, step_id: StepId) -> None:
        """Every step up to this one is done: what only they named becomes idle."""
        self._reclaim(self.pool.step_done(step_id))

    def _reclaim(self, swa_block_ids: Sequence[int]) -> None:
        for swa_block_id in swa_block_ids:
            self._queue.add(self._entries[swa_block_id])

    # Content

    def allocate(self, first_index: int, fa_blocks: Sequence[FaBlock]) -> list[SwaEntry]:
        """Blocks to write for consecutive FA blocks, the first of them at `first_index`.

        From the idle pool; only when that is empty, reclaimable blocks are evicted, lowest value first.
        The caller has compared the demand with `room`.
        """
        self._make_room(len(fa_blocks))
        swa_block_ids = self.pool.allocate(len(fa_blocks))
        return list(map(self._made, swa_block_ids, count(first_index), fa_blocks))

    def reserve(self, num_blocks: int) -> list[int]:
        """Blocks to load into, held by the load, not bound to an FA block yet. As for `allocate`."""
        self._make_room(num_blocks)
        return self.pool.allocate(num_blocks, held=True)

    def free_reserved(self, swa_block_ids: Sequence[int]) -> None:
        """Reserved blocks whose load has failed, or was not needed."""
        self.pool.unhold(swa_block_ids)

    def bind(self, swa_block_id: int, index: int, fa_block: FaBlock) -> SwaEntry:
        """A reserved block holds the window content of this FA block, which stands in the tree and has no
        valid SWA block: it is fixed, and still held."""
        entry = self._made(swa_block_id, index, fa_block)
        entry.is_content_fixed = True
        self._fixed[fa_block.fa_block_id] = entry
        self.pool.keep(swa_block_id)
        return entry

    def _made(self, swa_block_id: int, index: int, fa_block: FaBlock) -> SwaEntry:
        entry = SwaEntry(
            swa_block_id=swa_block_id,
            fa_block_id=fa_block.fa_block_id,
            fa_generation=fa_block.generation,
            prefix_fa_block_num=index,
            insertion=self._num_made,
            weighed_at=self._queue.age,
        )
        self._num_made += 1
        self._entries[swa_block_id] = entry
        return entry

    def _make_room(self, num_blocks: int) -> None:
        while self.pool.num_free < num_blocks:
            self._evict()

    def _evict(self) -> None:
        if not len(self._queue):
            raise InvariantViolated("an SWA block is to be evicted, but none is reclaimable")
        entry = self._queue.pop()
        del self._entries[entry.swa_block_id]
        del self._fixed[entry.fa_block_id]
        self.pool.discard(entry.swa_block_id)
        self.num_evictions += 1

    def fix(self, entry: SwaEntry, filled: SwaFilled, last_step_id: StepId) -> SwaEntry:
        """A written block is full and its FA block stands in the tree. Returns the entry that its owner
        references from now on: another one, if the FA block has a valid SWA block already."""
        if entry.is_content_fixed:
            raise InvariantViolated(f"SWA block {entry.swa_block_id} was filled twice")
        equal = self._fixed.get(filled.fa_block_id)
        if equal is not None:
            if equal.fa_generation != filled.generation:
                raise InvariantViolated(f"{filled} finds the SWA block of an earlier life: {equal}")
            self.set_reclaimable(filled.fa_block_id, False)
            self.release((entry,), last_step_id)
            return equal
        entry.fa_block_id = filled.fa_block_id
        entry.fa_generation = filled.generation
        entry.is_content_fixed = True
        self._fixed[filled.fa_block_id] = entry
        self.pool.keep(entry.swa_block_id)
        return entry

    def forget(self, fa_block: FaBlock) -> None:
        """The FA block was evicted: its SWA block, if it has one, is free."""
        if self.is_valid(fa_block):
            entry = self._fixed.pop(fa_block.fa_block_id)
            self._queue.remove(entry)
            del self._entries[entry.swa_block_id]
            self.pool.discard(entry.swa_block_id)

    # Checks

    def fixed_entries(self) -> list[SwaEntry]:
        return list(self._fixed.values())

    def check_sums(self) -> None:
        """O(1)."""
        self.pool.check_sums()
        if len(self._queue) != self.pool.num_cached:
            raise InvariantViolated(
                f"{len(self._queue)} entries wait, {self.pool.num_cached} are reclaimable"
            )

    def check(self) -> None:
        """O(pool): the invariants above."""
        self.check_sums()
        self.pool.check()
        for swa_block_id, entry in self._entries.items():
            reclaimable = entry.is_content_fixed and not self.pool.reference_count(swa_block_id)
            if reclaimable != (entry in self._queue) or reclaimable != self.pool.is_cached(swa_block_id):
                raise InvariantViolated(f"reclaimable or not: {entry}")
            is_known = self._fixed.get(entry.fa_block_id) is entry
            if entry.swa_block_id != swa_block_id or entry.is_content_fixed != is_known:
                raise InvariantViolated(f"found under the wrong name: {entry}")
            if not entry.is_content_fixed and not self.pool.owner_count(swa_block_id):
                raise InvariantViolated(f"nobody writes it: {entry}")
        if any(entry.swa_block_id not in self._entries for entry in self._fixed.values()):
            raise InvariantViolated("a fixed entry without a block")

    def snapshot(self) -> SwaCacheSnapshot:
        """The whole state as plain values, which later changes do not touch."""
        return {
            "pool": self.pool.snapshot(),
            "entries": [msgspec.structs.replace(entry, queue_key=0) for entry in self._entries.values()],
            "queue": self._queue.snapshot(),
            "queue_num_evictions": self._queue.num_evictions,
            "queue_clock": self._queue.clock,
            "num_made": self._num_made,
            "num_evictions": self.num_evictions,
        }

    def restore(self, snapshot: SwaCacheSnapshot) -> None:
        """Go on from a snapshot. Raises InvariantViolated for one that could not have been taken here."""
        self.pool.restore(snapshot["pool"])
        entries = [msgspec.structs.replace(entry) for entry in snapshot["entries"]]
        self._entries = {entry.swa_block_id: entry for entry in entries}
        self._fixed = {entry.fa_block_id: entry for entry in entries if entry.is_content_fixed}
        self._num_made = snapshot["num_made"]
        self.num_evictions = snapshot["num_evictions"]
        if not all(0 <= block_id < self.pool.num_blocks for block_id in self._entries):
            raise InvariantViolated("an SWA entry of a block that the pool does not have")
        queued = self.entries_of(snapshot["queue"])
        self._queue.restore(queued, snapshot["queue_num_evictions"], snapshot["queue_clock"])
        self.check()

    def entries_of(self, swa_block_ids: Iterable[int]) -> list[SwaEntry]:
        """The entries of these blocks. Raises InvariantViolated if there is none."""
        entries = [self._entries.get(swa_block_id) for swa_block_id in swa_block_ids]
        found = [entry for entry in entries if entry is not None]
        if len(found) != len(entries):
            raise InvariantViolated(f"SWA blocks without an entry among {list(swa_block_ids)}")
        return found
