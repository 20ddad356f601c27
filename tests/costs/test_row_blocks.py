"""Blocks of decodes on processors: against a simulation that steps through time."""

from __future__ import annotations

import random

import msgspec
import pytest

from ksana.costs.row_blocks import RowBlocks, Tails, equal_tail_us, tail_us

BLOCKS = RowBlocks(heads=2, slots=6, serial_us=0.03, shared_us=0.01, split_below=8)


def stepped_us(blocks: RowBlocks, lengths: list[float]) -> float:
    """How long all blocks take, second by second: as many as there are slots at a time, in order, each at its
    share of the bandwidth but no faster than one alone."""
    waiting = [length for _ in range(blocks.heads) for length in lengths]
    under_way: list[float] = []
    now = 0.0
    while waiting or under_way:
        while waiting and len(under_way) < blocks.slots:
            under_way.append(waiting.pop(0))
        per_token = max(blocks.serial_us, len(under_way) * blocks.shared_us)
        least = min(under_way)
        now += least * per_token
        under_way = [left - least for left in under_way if left > least]
    return now


@pytest.mark.parametrize("seed", range(8))
def test_a_batch_takes_its_sum_and_its_tail(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [float(rng.randint(1, 4000)) for _ in range(rng.randint(1, 20))]
    total = blocks_sum(lengths) + tail_us(BLOCKS, lengths)
    assert total == pytest.approx(stepped_us(BLOCKS, lengths))


def blocks_sum(lengths: list[float]) -> float:
    return BLOCKS.heads * sum(lengths) * BLOCKS.shared_us


@pytest.mark.parametrize("num", range(1, 14))
def test_rows_of_one_length_leave_idle_what_the_last_round_does(num: int) -> None:
    assert equal_tail_us(BLOCKS, num, 700) == pytest.approx(tail_us(BLOCKS, [700.0] * num))


def test_a_full_last_round_has_no_tail_and_one_block_too_many_has_one() -> None:
    assert equal_tail_us(BLOCKS, 6, 1000) == 0  # 12 blocks in 6 slots
    assert equal_tail_us(BLOCKS, 7, 1000) == pytest.approx((0.03 - 2 * 0.01) * 1000)
    assert equal_tail_us(BLOCKS, 8, 1000) == 0  # 4 left: as fast as the memory


def test_tails_of_a_batch_that_grows_are_near_to_their_own_and_do_not_depend_on_the_past() -> None:
    rng = random.Random(4)
    start = [rng.randint(20, 3000) for _ in range(9)]
    forward, backward = Tails(BLOCKS), Tails(BLOCKS)
    grown = [[length + step for length in start] for step in range(100)]
    there = [forward.microseconds(lengths) for lengths in grown]
    back = [backward.microseconds(lengths) for lengths in reversed(grown)]
    assert there == list(reversed(back))
    for lengths, us in zip(grown, there, strict=True):
        assert us == pytest.approx(tail_us(BLOCKS, lengths), abs=32 * BLOCKS.serial_us)


def test_batches_with_few_blocks_are_split() -> None:
    assert [BLOCKS.are_split(num) for num in (1, 3, 4, 9)] == [True, True, False, False]
    halved = msgspec.structs.replace(BLOCKS, heads=1)
    assert halved.are_split(7)
