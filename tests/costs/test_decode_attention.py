"""Decodes alone where blocks are known: two kernels, padding, and the last round of blocks."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ksana.costs.cost_file import CostModel, load_cost, save_cost
from ksana.costs.extrapolation import ExtrapolationError
from ksana.costs.profile_cost import ProfileCost
from ksana.costs.row_blocks import RowBlocks, tail_us
from ksana.costs.skew_table import SkewRates
from ksana.costs.step_cost import StepShape
from ksana.errors import ConfigError
from ksana.perf.profile_tables import read_profile
from tests.costs.profiles import write_profile
from tests.costs.test_profile_cost import shape

BLOCKS = RowBlocks(heads=2, slots=12, serial_us=0.03, shared_us=0.01, split_below=16)
LAUNCH_US = 10.0


def whole_us(lengths: list[int]) -> float:
    """As a kernel takes that does not split: a launch, the sum, the tail."""
    return LAUNCH_US + 2 * 0.01 * sum(lengths) + tail_us(BLOCKS, lengths)


def split_us(num: int, kv: float) -> float:
    return 2 * LAUNCH_US + 2 * 0.01 * num * kv


def cost_of(directory: Path, *, padded: tuple[int, ...] = ()) -> ProfileCost:
    write_profile(directory)
    tables = read_profile(directory, num_layers=1)
    grid = tables.attention
    decode_us = tuple(
        tuple(split_us(num, kv) if BLOCKS.are_split(num) else whole_us([kv] * num) for kv in grid.decode_kv)
        for num in grid.decodes
    )
    grid = msgspec.structs.replace(grid, decode_us=decode_us)
    rates = SkewRates(decodes=(4,), longer=((1,),), us_per_token=((0.5,),))
    tables = msgspec.structs.replace(
        tables, attention=grid, blocks=BLOCKS, skew_alone=rates, padded_sizes=padded
    )
    return ProfileCost(tables)


def step(*lengths: int) -> StepShape:
    return msgspec.structs.replace(
        shape(decodes=len(lengths)),
        decode_kv=sum(lengths),
        max_decode_kv=max(lengths),
        decode_lengths=lengths,
    )


def test_measured_points_stay(tmp_path: Path) -> None:
    cost = cost_of(tmp_path)
    for num, kv in ((1, 16), (2, 64), (8, 256), (32, 1024)):
        expected = split_us(num, kv) if num < 8 else whole_us([kv] * num)
        assert cost.attention_us(shape(decodes=num, kv=kv)) == pytest.approx(expected)


def test_between_measured_numbers_of_rows_the_last_round_counts(tmp_path: Path) -> None:
    """13 rows are 26 blocks: 2 are left for a third round of 12, and take as long as one alone."""
    cost = cost_of(tmp_path)
    for num in (8, 12, 13, 18, 20, 31):
        us = cost.attention_us(shape(decodes=num, kv=256))
        assert us == pytest.approx(whole_us([256] * num)), num
    more = cost.attention_us(shape(decodes=13, kv=256)) - cost.attention_us(shape(decodes=12, kv=256))
    assert more > 3 * 2 * 0.01 * 256 / 2


def test_unequal_lengths_have_a_tail(tmp_path: Path) -> None:
    lengths = [100] * 12 + [1000] + [200] * 5
    us = cost_of(tmp_path).attention_us(step(*lengths))
    assert us == pytest.approx(whole_us(lengths), abs=32 * BLOCKS.serial_us)
    assert us > whole_us([166] * 18) + 5


def test_the_kernel_is_that_of_the_captured_size(tmp_path: Path) -> None:
    """7 rows are too few to stay whole, but they run in a graph that was captured for 8."""
    assert cost_of(tmp_path).attention_us(shape(decodes=7, kv=256)) == pytest.approx(split_us(7, 256))
    padded = cost_of(tmp_path, padded=(1, 4, 8, 16)).attention_us(shape(decodes=7, kv=256))
    assert padded == pytest.approx(whole_us([256] * 7))


def test_split_batches_have_the_rates_that_were_measured(tmp_path: Path) -> None:
    us = cost_of(tmp_path).attention_us(step(100, 100, 100, 300))
    assert us == pytest.approx(split_us(4, 150) + 0.5 * 200)


def test_beyond_the_tables_it_says_so(tmp_path: Path) -> None:
    cost = cost_of(tmp_path)
    for outside in (shape(decodes=33, kv=64), shape(decodes=4, kv=1025)):
        with pytest.raises(ExtrapolationError, match="outside of what the cost model was made from"):
            cost.attention_us(outside)


def test_files_hold_blocks_and_impossible_ones_are_refused(tmp_path: Path) -> None:
    model = CostModel(cost_of(tmp_path).tables)
    save_cost(tmp_path / "cost.json", model)
    assert load_cost(tmp_path / "cost.json").data == model.data
    for change, message in (
        ({"heads": 0}, "heads must be from 1"),
        ({"slots": 1 << 40}, "slots must be from 1"),
        ({"split_below": -1}, "split_below is negative"),
        ({"serial_us": float("nan")}, "not a number"),
    ):
        raw = msgspec.to_builtins(BLOCKS) | change
        broken = msgspec.structs.replace(model.data, blocks=RowBlocks(**raw))
        with pytest.raises(ConfigError, match=message):
            CostModel(broken)
