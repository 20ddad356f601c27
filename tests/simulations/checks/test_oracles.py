"""Who is evicted is compared with a list of all uses."""

from __future__ import annotations

import random
from math import ldexp
from typing import get_args

import pytest

from ksana.cache.cache_config import SwaEviction
from ksana.cache.swa_entry import SwaEntry, SwaEvictionQueue
from simulations.checks.oracles import _watch_queue
from simulations.checks.promises import BrokenPromise


def live(queue: SwaEvictionQueue, num_rounds: int = 600) -> None:
    """Entries are made, used, given back and evicted, in a pool of 8."""
    _watch_queue(queue)
    rng = random.Random(3)
    entries: list[SwaEntry] = []
    for number in range(num_rounds):
        if len(entries) == 8:
            entries.remove(queue.pop())
        made = SwaEntry(
            swa_block_id=0,
            fa_block_id=0,
            fa_generation=0,
            prefix_fa_block_num=rng.randrange(3),
            insertion=number,
            weighed_at=queue.age,
        )
        entries.append(made)
        queue.add(made)
        for entry in rng.sample(entries, rng.randint(0, len(entries)) // 2):
            queue.remove(entry)
            queue.count_hit(entry)
            queue.add(entry)


@pytest.mark.parametrize("policy", get_args(SwaEviction))
def test_what_is_evicted_is_worth_least(policy: SwaEviction) -> None:
    queue = SwaEvictionQueue(policy, 8)
    live(queue)
    assert queue.age > 50


def test_hits_that_are_not_aged_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def count_hit(self: SwaEvictionQueue, entry: SwaEntry) -> None:
        entry.hit_count += 1
        entry.weight = ldexp(entry.weight, entry.weighed_at - self.age) - 1.0
        entry.weighed_at = self.age

    monkeypatch.setattr(SwaEvictionQueue, "count_hit", count_hit)
    with pytest.raises(BrokenPromise, match="is worth less"):
        live(SwaEvictionQueue("lfu-aged", 8))


def test_the_most_recently_used_going_first_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(self: SwaEvictionQueue, _entry: SwaEntry) -> int:
        return -self._clock

    monkeypatch.setattr(SwaEvictionQueue, "_key", key)
    with pytest.raises(BrokenPromise, match="is worth less"):
        live(SwaEvictionQueue("lru", 8))
