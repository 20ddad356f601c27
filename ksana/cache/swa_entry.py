"""What is known of one SWA block, and in which order they are evicted."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import msgspec

from ksana.cache.cache_config import SwaEviction


class SwaEntry(msgspec.Struct, kw_only=True):
    """One SWA block and the FA block it hangs on. How often it is referenced the pool knows."""

    swa_block_id: int
    fa_block_id: int
    fa_generation: int
    prefix_fa_block_num: int
    """FA blocks before it; the first block of a sequence has 0."""
    insertion: int
    """Entries are numbered in the order of their making."""
    hit_count: int = 0
    is_content_fixed: bool = False
    """Its tokens are computed and its FA block stands in the tree; before that it is nobody's cache."""
    last_released: int = 0
    """Number of the release that made it reclaimable."""


Rank = tuple[int, int, int]
"""Lowest first out."""


class SwaEvictionQueue:
    """Reclaimable entries, the least valuable first.

    lfu: fewest hits, then smallest position (it saves the least computation), then oldest.
    lru: longest without a reference.
    An entry's rank cannot change while it is reclaimable; entries that are referenced again leave a stale
    record behind. Cost: O(log n); a rebuild, at amortised O(1), when more than half of it is stale.
    """

    def __init__(self, policy: SwaEviction) -> None:
        self._policy = policy
        self._queue: list[tuple[Rank, int]] = []
        self._queued: dict[int, Rank] = {}
        """SWA block id and the rank under which it now waits."""
        self._clock = 0

    def __len__(self) -> int:
        return len(self._queued)

    def __contains__(self, swa_block_id: int) -> bool:
        return swa_block_id in self._queued

    def rank(self, entry: SwaEntry) -> Rank:
        if self._policy == "lru":
            return (entry.last_released, entry.prefix_fa_block_num, entry.insertion)
        return (entry.hit_count, entry.prefix_fa_block_num, entry.insertion)

    def add(self, entry: SwaEntry) -> None:
        """The entry became reclaimable."""
        self._clock += 1
        entry.last_released = self._clock
        rank = self.rank(entry)
        self._queued[entry.swa_block_id] = rank
        heappush(self._queue, (rank, entry.swa_block_id))
        if len(self._queue) > 2 * len(self._queued) + 1024:
            self._queue = [(rank, block_id) for block_id, rank in self._queued.items()]
            heapify(self._queue)

    def remove(self, swa_block_id: int) -> None:
        """The entry is referenced again, or gone."""
        del self._queued[swa_block_id]

    def pop(self) -> int:
        """Take out the entry of lowest value: its SWA block id. IndexError if there is none."""
        while True:
            rank, swa_block_id = heappop(self._queue)
            if self._queued.get(swa_block_id) == rank:
                del self._queued[swa_block_id]
                return swa_block_id

    def snapshot(self) -> list[tuple[Rank, int]]:
        """Who waits, in order of eviction."""
        return sorted((rank, block_id) for block_id, rank in self._queued.items())
