"""What is known of one SWA block, and in which order they are evicted."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import frexp, ldexp

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
    weight: float = 1.0
    """Its making and its hits, aged (lfu-aged): in units of one hit in age `weighed_at`."""
    weighed_at: int = 0


FIELD_BITS = 40
"""Ids, positions, hits and counts are far below 2**40."""
MANTISSA_BITS = 53
"""Of a float; weights are sums of powers of two, and exact while they span less."""


class SwaEvictionQueue:
    """Reclaimable entries, the least valuable first.

    lfu: fewest hits, then smallest position (it saves the least computation), then oldest.
    lru: longest without a reference.
    lfu-aged: like lfu, but the making of the block counts as well, and everything that counts is halved
    once in an age. An age is as many evictions as the pool has blocks: the time in which it would be
    filled anew. Halving all weights alike changes no order, so it is never done: a hit of a later age
    counts twice as much instead (exact powers of two).
    A rank is one integer, fields from high to low, the SWA block id last: compared in one go. It cannot
    change while its entry is reclaimable; entries that are referenced again leave a stale rank behind.
    Cost: O(log n); a rebuild, at amortised O(1), when more than half of the ranks are stale.
    """

    def __init__(self, policy: SwaEviction, num_blocks: int) -> None:
        self._policy = policy
        self._evictions_per_age = num_blocks
        self._num_evictions = 0
        self._heap: list[int] = []
        self._queued: dict[int, int] = {}
        """SWA block id and the rank under which it now waits."""
        self._clock = 0

    def __len__(self) -> int:
        return len(self._queued)

    def __contains__(self, swa_block_id: int) -> bool:
        return swa_block_id in self._queued

    @property
    def age(self) -> int:
        return self._num_evictions // self._evictions_per_age

    def count_hit(self, entry: SwaEntry) -> None:
        """One more use of an entry that is not reclaimable now."""
        entry.hit_count += 1
        entry.weight = ldexp(entry.weight, entry.weighed_at - self.age) + 1.0
        entry.weighed_at = self.age

    def _rank(self, entry: SwaEntry) -> int:
        if self._policy == "lfu":
            value = entry.hit_count
        elif self._policy == "lru":
            value = entry.last_released
        else:
            mantissa, exponent = frexp(entry.weight)
            value = (exponent + entry.weighed_at) << MANTISSA_BITS | int(ldexp(mantissa, MANTISSA_BITS))
        rank = value << FIELD_BITS | entry.prefix_fa_block_num
        rank = rank << FIELD_BITS | entry.insertion
        return rank << FIELD_BITS | entry.swa_block_id

    def add(self, entry: SwaEntry) -> None:
        """The entry became reclaimable."""
        self._clock += 1
        entry.last_released = self._clock
        rank = self._rank(entry)
        self._queued[entry.swa_block_id] = rank
        heappush(self._heap, rank)
        if len(self._heap) > 2 * len(self._queued) + 1024:
            self._heap = list(self._queued.values())
            heapify(self._heap)

    def remove(self, swa_block_id: int) -> None:
        """The entry is referenced again, or gone."""
        del self._queued[swa_block_id]

    def pop(self) -> int:
        """Take out the entry of lowest value: its SWA block id. IndexError if there is none."""
        while True:
            rank = heappop(self._heap)
            swa_block_id = rank & ((1 << FIELD_BITS) - 1)
            if self._queued.get(swa_block_id) == rank:
                del self._queued[swa_block_id]
                self._num_evictions += 1
                return swa_block_id

    def snapshot(self) -> list[int]:
        """SWA block ids in order of eviction."""
        ranks = sorted((rank, swa_block_id) for swa_block_id, rank in self._queued.items())
        return [swa_block_id for _, swa_block_id in ranks]
