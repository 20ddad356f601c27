"""Block ids: order, states, generations, blocks that wait for a step."""

from __future__ import annotations

import pytest

from ksana.cache.block_pool import BlockPool
from ksana.errors import InvariantViolated


def test_ids_come_in_order_and_the_last_freed_comes_first() -> None:
    pool = BlockPool(5)
    assert pool.allocate(3) == [0, 1, 2]
    pool.release([1, 0], 0)
    assert pool.allocate(3) == [0, 1, 3]
    pool.check()


def test_a_new_life_has_a_new_generation() -> None:
    pool = BlockPool(1)
    generations = []
    for _ in range(3):
        [block_id] = pool.allocate(1)
        generations.append(pool.generation(block_id))
        pool.release([block_id], 0)
    assert generations == [1, 2, 3]


def test_states_of_a_block() -> None:
    pool = BlockPool(3)
    [block_id] = pool.allocate(1)
    pool.keep(block_id)
    pool.share(block_id)
    assert pool.release([block_id], 7) == []
    assert (pool.num_referenced, pool.reference_count(block_id), pool.owner_count(block_id)) == (1, 2, 1)
    assert pool.release([block_id], 8) == []
    assert (pool.num_referenced, pool.num_deferred) == (0, 1)
    pool.check()
    assert pool.step_done(7) == []
    assert pool.num_deferred == 1
    assert pool.step_done(8) == [block_id]
    assert (pool.num_deferred, pool.num_cached, pool.num_free) == (0, 1, 2)
    pool.share(block_id)
    assert (pool.num_cached, pool.num_referenced) == (0, 1)
    assert pool.release([block_id], 8) == [block_id]
    pool.discard(block_id)
    assert pool.num_free == 3
    pool.check()


def test_a_deferred_block_that_is_shared_again_stays_referenced() -> None:
    pool = BlockPool(1)
    pool.allocate(1)
    pool.keep(0)
    pool.release([0], 3)
    pool.share(0)
    assert pool.step_done(3) == []
    assert (pool.num_referenced, pool.num_deferred) == (1, 0)
    pool.check()


def test_blocks_become_idle_in_the_order_of_their_steps() -> None:
    pool = BlockPool(4)
    for block_id in pool.allocate(4):
        pool.keep(block_id)
    pool.release([3], 2)
    pool.release([1, 0], 1)
    pool.release([2], 2)
    assert pool.step_done(2) == [1, 0, 3, 2]


def test_misuse_is_a_bug_and_says_so() -> None:
    pool = BlockPool(2)
    with pytest.raises(InvariantViolated, match="3 blocks asked"):
        pool.allocate(3)
    with pytest.raises(InvariantViolated, match="without an owner"):
        pool.release([0], 0)
    with pytest.raises(InvariantViolated, match="counted on while free"):
        pool.share(0)
    with pytest.raises(InvariantViolated, match="counted on while free"):
        pool.hold(0)
    with pytest.raises(InvariantViolated, match="without a holder"):
        pool.unhold([0])
    with pytest.raises(InvariantViolated, match="kept"):
        pool.keep(0)
    pool.allocate(1)
    pool.keep(0)
    with pytest.raises(InvariantViolated, match="kept twice"):
        pool.keep(0)
    with pytest.raises(InvariantViolated, match="discarded"):
        pool.discard(0)
    pool.step_done(4)
    with pytest.raises(InvariantViolated, match="only 3"):
        pool.step_done(3)


def test_check_notices_a_lost_block() -> None:
    pool = BlockPool(3)
    pool.check()
    pool._free.pop()
    with pytest.raises(InvariantViolated, match="add up"):
        pool.check_sums()


def test_check_notices_a_block_freed_while_owned() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    pool._free[0] = 0
    pool.check_sums()
    with pytest.raises(InvariantViolated, match="free is idle"):
        pool.check()
