"""SWA entries: references, content, eviction order; with the worked example of the specification."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from ksana.cache.cache_config import CacheConfig, SwaEviction
from ksana.cache.swa_cache import SwaCache, SwaCacheSnapshot
from ksana.cache.swa_entry import SwaEntry
from ksana.errors import InvariantViolated
from ksana.messages.swa import FaBlock, SwaFilled


def make_cache(num_blocks: int, policy: SwaEviction = "lfu") -> SwaCache:
    return SwaCache(
        CacheConfig(
            block_size=16,
            num_fa_blocks=100,
            num_swa_blocks=num_blocks,
            sliding_window=64,
            swa_eviction=policy,
        )
    )


def fa(fa_block_id: int, generation: int = 1) -> FaBlock:
    return FaBlock(fa_block_id=fa_block_id, generation=generation)


def filled(index: int, fa_block_id: int, generation: int = 1) -> SwaFilled:
    return SwaFilled(index=index, fa_block_id=fa_block_id, generation=generation)


def add_entry(
    cache: SwaCache,
    fa_block_id: int,
    *,
    hits: int,
    position: int,
    fixed: bool = True,
    referenced: bool = False,
) -> SwaEntry:
    [entry] = cache.allocate(position, [fa(fa_block_id)])
    if fixed:
        assert cache.fix(entry, filled(position, fa_block_id), 0) is entry
        for _ in range(hits):
            cache.increment_hit_count(fa_block_id)
        if not referenced:
            cache.set_reclaimable(fa_block_id, True)
    cache.check()
    return entry


def worked_example() -> SwaCache:
    """Idle pool 1; a to f are FA blocks 0 to 5."""
    cache = make_cache(7)
    add_entry(cache, 0, hits=2, position=0)
    add_entry(cache, 1, hits=1, position=7)
    add_entry(cache, 2, hits=1, position=3)
    add_entry(cache, 3, hits=1, position=3, fixed=False)
    add_entry(cache, 4, hits=0, position=9, referenced=True)
    add_entry(cache, 5, hits=3, position=1)
    assert cache.pool.num_free == 1
    return cache


def valid(cache: SwaCache) -> str:
    return "".join(
        name for name, fa_block_id in zip("abcdef", range(6), strict=True) if cache.is_valid(fa(fa_block_id))
    )


def test_worked_example_evicts_c_b_a_f() -> None:
    cache = worked_example()
    for new, left in [(10, "abcef"), (11, "abef"), (12, "aef"), (13, "ef"), (14, "e")]:
        cache.allocate(0, [fa(new)])
        cache.check()
        assert valid(cache) == left
    assert cache.room == 0
    assert cache.num_evictions == 4


def test_worked_example_need_of_three_takes_idle_c_b() -> None:
    cache = worked_example()
    assert cache.room == 5  # so a need of 6 is refused
    cache.allocate(0, [fa(10), fa(11), fa(12)])
    assert valid(cache) == "aef"


def test_equal_hits_and_positions_leave_in_the_order_they_came() -> None:
    cache = make_cache(3)
    for fa_block_id in (5, 3, 4):
        add_entry(cache, fa_block_id, hits=0, position=2)
    cache.allocate(0, [fa(10)])
    assert [cache.is_valid(fa(f)) for f in (5, 3, 4)] == [False, True, True]


def test_lru_evicts_what_was_longest_without_a_reference() -> None:
    cache = make_cache(3, "lru")
    for fa_block_id in (0, 1, 2):
        add_entry(cache, fa_block_id, hits=9 - fa_block_id, position=fa_block_id)
    cache.set_reclaimable(0, False)
    cache.set_reclaimable(0, True)
    cache.allocate(0, [fa(10), fa(11)])
    cache.check()
    assert valid(cache) == "a"


@pytest.mark.parametrize("policy", get_args(SwaEviction))
def test_a_snapshot_fits_into_msgpack_and_keeps_the_order(policy: SwaEviction) -> None:
    """The keys of lfu-aged are longer than the numbers of msgpack."""
    cache, twin = make_cache(6, policy), make_cache(6, policy)
    for fa_block_id, hits in enumerate((3, 0, 2, 2, 0, 1)):
        add_entry(cache, fa_block_id, hits=hits, position=fa_block_id % 2)
    twin.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(cache.snapshot()), type=SwaCacheSnapshot))
    assert twin.snapshot() == cache.snapshot()
    for new in range(10, 16):
        for one in (cache, twin):
            one.allocate(0, [fa(new)])
            one.check()
        assert valid(twin) == valid(cache)


def test_a_referenced_entry_is_no_candidate_until_its_step_is_done() -> None:
    cache = make_cache(1)
    add_entry(cache, 0, hits=0, position=0)
    cache.set_reclaimable(0, False)
    assert (cache.room, cache.is_reclaimable(0)) == (0, False)
    cache.set_reclaimable(0, True, until_step=4)
    assert cache.room == 0
    cache.step_done(3)
    assert cache.room == 0
    cache.step_done(4)
    assert (cache.room, cache.is_reclaimable(0)) == (1, True)
    cache.check()


def test_a_block_filled_for_an_fa_block_that_has_one_is_given_up() -> None:
    cache = make_cache(4)
    first = add_entry(cache, 0, hits=0, position=0)
    [second] = cache.allocate(0, [fa(7)])
    assert cache.fix(second, filled(0, 0), 5) is first
    assert not cache.is_reclaimable(0)
    assert cache.pool.use().num_deferred == 1
    cache.step_done(5)
    assert cache.pool.num_free == 3
    cache.check()


def test_a_block_moves_to_the_surviving_fa_block() -> None:
    cache = make_cache(4)
    [entry] = cache.allocate(2, [fa(7)])
    assert cache.fix(entry, filled(2, 3, 9), 0) is entry
    assert cache.is_valid(fa(3, 9))
    assert not cache.is_valid(fa(3, 8))
    assert not cache.is_valid(fa(7))
    assert entry.prefix_fa_block_num == 2
    cache.check()


def test_an_evicted_fa_block_frees_its_swa_block() -> None:
    cache = make_cache(2)
    add_entry(cache, 0, hits=5, position=0)
    cache.forget(fa(0, 2))  # another life
    assert cache.is_valid(fa(0))
    cache.forget(fa(0))
    cache.forget(fa(1))
    assert (cache.pool.num_free, cache.num_evictions) == (2, 0)
    cache.check()


def test_misuse_is_a_bug_and_says_so() -> None:
    cache = make_cache(2)
    entry = add_entry(cache, 0, hits=0, position=0, referenced=True)
    with pytest.raises(InvariantViolated, match="filled twice"):
        cache.fix(entry, filled(0, 0), 0)
    cache.allocate(1, [fa(1)])
    with pytest.raises(InvariantViolated, match="none is reclaimable"):
        cache.allocate(2, [fa(2)])
    [other] = make_cache(1).allocate(0, [fa(4)])
    with pytest.raises(InvariantViolated, match="earlier life"):
        cache.fix(other, filled(0, 0, 2), 0)


def test_many_references_do_not_fill_the_queue() -> None:
    cache = make_cache(2)
    add_entry(cache, 0, hits=0, position=0)
    for _ in range(5000):
        cache.set_reclaimable(0, False)
        cache.set_reclaimable(0, True)
    assert sum(map(len, cache._queue._buckets.values())) < 2000
    cache.check()
