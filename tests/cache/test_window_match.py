"""The Continuous Window Condition: the table of the specification, and brute force."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from ksana.cache.cache_config import CacheConfig
from ksana.cache.window_match import last_valid_end, registered_blocks


@dataclass
class Case:
    name: str
    window: int
    block_size: int
    window_blocks: int
    bits: str
    last_strict: int
    registered_strict: tuple[int, int] | None
    last_open: int


CASES = [
    Case("A", 128, 64, 2, "11111", 5, (3, 4), 5),
    Case("B", 128, 64, 2, "101101", 4, (2, 3), 4),
    Case("C", 100, 16, 7, "1111111" + "0" + "1111", 7, (0, 6), 7),
    Case("D", 100, 16, 7, "1110" + "1" * 8, 12, (5, 11), 12),
    Case("E", 100, 16, 7, "111111", 0, None, 6),
    Case("F", 64, 16, 4, "00111", 0, None, 0),
    Case("G", 64, 16, 4, "00111001111", 11, (7, 10), 11),
    Case("H", 64, 16, 4, "00111001101", 0, None, 0),
    Case("I", 1, 16, 1, "010", 2, (1, 1), 2),
    Case("J", 65, 64, 2, "1101", 2, (0, 1), 2),
    Case("K", 4096, 64, 64, "1" * 63, 0, None, 63),
    Case("L", 4096, 64, 64, "0" * 6 + "1" * 64, 70, (6, 69), 70),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_table(case: Case) -> None:
    config = CacheConfig(
        block_size=case.block_size, num_fa_blocks=1, num_swa_blocks=1, sliding_window=case.window
    )
    assert config.window_blocks == case.window_blocks
    bits = [bit == "1" for bit in case.bits]
    last = last_valid_end(bits, case.window_blocks, window_open_at_start=False)
    assert last == case.last_strict
    registered = registered_blocks(last, case.window_blocks)
    ends = (registered[0], registered[-1]) if registered else None
    assert ends == case.registered_strict
    assert last_valid_end(bits, case.window_blocks, window_open_at_start=True) == case.last_open


@pytest.mark.parametrize("window_open_at_start", [False, True])
@pytest.mark.parametrize("window_blocks", range(1, 6))
def test_every_bit_string_up_to_12(window_blocks: int, window_open_at_start: bool) -> None:
    """The rule itself: the largest endpoint with a whole window of valid blocks before it."""
    for length in range(13):
        for bits in itertools.product((False, True), repeat=length):

            def is_valid(index: int, bits: tuple[bool, ...] = bits) -> bool:
                return bits[index] if index >= 0 else window_open_at_start

            ends = [
                end
                for end in range(1, length + 1)
                if all(is_valid(end - distance) for distance in range(1, window_blocks + 1))
            ]
            expected = max(ends, default=0)
            last = last_valid_end(bits, window_blocks, window_open_at_start=window_open_at_start)
            assert last == expected, bits
            registered = registered_blocks(last, window_blocks)
            assert all(bits[index] for index in registered)
            assert len(registered) == min(last, window_blocks)


def test_open_start_needs_the_first_block_itself() -> None:
    assert last_valid_end([False], 2, window_open_at_start=True) == 0
    assert last_valid_end([True, False], 2, window_open_at_start=True) == 1
    assert registered_blocks(1, 2) == range(1)
