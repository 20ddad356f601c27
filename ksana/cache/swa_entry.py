"""What is known of one SWA block, and in which order they are evicted."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from math import frexp, ldexp

import msgspec

from ksana.cache.cache_config import SwaEviction


class SwaEntry(msgspec.Struct, kw_only=True, gc=False):
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
    queue_key: int = 0
    queue_number: int = -1
    """Its place in the order of eviction; only while it is reclaimable. The key follows from the rest and may
    be longer than the 64 bits of a number in msgpack."""
    weight: float = 1.0
    """Its making and its hits, aged (lfu-aged): in units of one hit in age `weighed_at`."""
    weighed_at: int = 0


POSITION_BITS = 40
"""Positions and numbers of blocks are far below 2**40."""
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

    Entries of equal value and position share a bucket; a heap has the buckets, and each bucket is a heap of
    numbers (nearly always added in ascending order). An entry's place cannot change while it is reclaimable;
    one that is referenced again leaves its number behind, which is then stale.
    Cost: O(log n); a rebuild, at amortised O(1), when more than half of the numbers are stale.
    """

    def __init__(self, policy: SwaEviction, num_blocks: int) -> None:
        self._policy = policy
        self._evictions_per_age = num_blocks
        self._num_evictions = 0
        self._buckets: dict[int, list[int]] = {}
        self._keys: list[int] = []
        """A heap of the buckets' keys."""
        self._queued: dict[int, SwaEntry] = {}
        """By number in its bucket, which no other entry has."""
        self._num_numbers = 0
        self._clock = 0

    def __len__(self) -> int:
        return len(self._queued)

    def __contains__(self, entry: SwaEntry) -> bool:
        return self._queued.get(entry.queue_number) is entry

    @property
    def age(self) -> int:
        return self._num_evictions // self._evictions_per_age

    def count_hit(self, entry: SwaEntry) -> None:
        """One more use of an entry that is not reclaimable now."""
        entry.hit_count += 1
        if self._policy == "lfu-aged":
            age = self.age
            entry.weight = ldexp(entry.weight, entry.weighed_at - age) + 1.0
            entry.weighed_at = age

    def _key(self, entry: SwaEntry) -> int:
        """What comes before the number in the order of eviction."""
        if self._policy == "lru":
            return 0
        value = entry.hit_count
        if self._policy == "lfu-aged":
            mantissa, exponent = frexp(entry.weight)
            value = (exponent + entry.weighed_at) << MANTISSA_BITS | int(ldexp(mantissa, MANTISSA_BITS))
        return value << POSITION_BITS | entry.prefix_fa_block_num

    def add(self, entry: SwaEntry) -> None:
        """The entry became reclaimable."""
        self._clock += 1
        entry.queue_key = self._key(entry)
        entry.queue_number = self._clock if self._policy == "lru" else entry.insertion
        self._queued[entry.queue_number] = entry
        self._put(entry)
        if self._num_numbers > 2 * len(self._queued) + 1024:
            self._rebuild()

    def _put(self, entry: SwaEntry) -> None:
        bucket = self._buckets.get(entry.queue_key)
        if bucket is None:
            self._buckets[entry.queue_key] = [entry.queue_number]
            heappush(self._keys, entry.queue_key)
        else:
            heappush(bucket, entry.queue_number)
        self._num_numbers += 1

    def _rebuild(self) -> None:
        self._buckets.clear()
        self._keys.clear()
        self._num_numbers = 0
        for number in sorted(self._queued):
            self._put(self._queued[number])

    def remove(self, entry: SwaEntry) -> None:
        """The entry is referenced again, or gone."""
        del self._queued[entry.queue_number]

    def pop(self) -> SwaEntry:
        """Take out the entry of lowest value. IndexError if there is none."""
        while True:
            key = self._keys[0]
            bucket = self._buckets[key]
            while bucket:
                number = heappop(bucket)
                self._num_numbers -= 1
                entry = self._queued.get(number)
                if entry is not None and entry.queue_key == key:
                    del self._queued[number]
                    self._num_evictions += 1
                    return entry
            heappop(self._keys)
            del self._buckets[key]

    def snapshot(self) -> list[int]:
        """SWA block ids in order of eviction."""
        order = sorted((entry.queue_key, number) for number, entry in self._queued.items())
        return [self._queued[number].swa_block_id for _, number in order]

    def restore(self, entries: Iterable[SwaEntry], num_evictions: int, clock: int) -> None:
        """Go on with these entries waiting, each under the number it has."""
        self._num_evictions, self._clock = num_evictions, clock
        self._queued = {entry.queue_number: entry for entry in entries}
        for entry in self._queued.values():
            entry.queue_key = self._key(entry)
        self._rebuild()

    @property
    def num_evictions(self) -> int:
        return self._num_evictions

    @property
    def clock(self) -> int:
        """Counts what became reclaimable."""
        return self._clock
