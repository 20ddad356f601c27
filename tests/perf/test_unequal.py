"""Which rule unequal lengths follow: made-up kernels whose processors are known must be found out."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from ksana.costs.attention_table import AttentionGrid
from ksana.costs.profile_cost import ProfileTables
from ksana.costs.row_blocks import RowBlocks, equal_tail_us, tail_us
from ksana.perf.block_fit import fit_blocks
from ksana.perf.devices import processors_of
from ksana.perf.profile_tables import read_profile
from ksana.perf.skew_rates import SkewRow
from ksana.perf.unequal import Device, with_unequal
from tests.costs.profiles import write_profile

NUMS = (2, 4, 8, 16, 32, 64, 128)
KV = (128, 256, 512, 1024, 2048, 4096)


def true_blocks(processors: int, heads: int) -> RowBlocks:
    return RowBlocks(
        heads=heads,
        slots=processors,
        serial_us=0.03,
        shared_us=0.0005,
        split_below=round(1.6 * processors),
    )


def tables_of(directory: Path, blocks: RowBlocks) -> ProfileTables:
    write_profile(directory)
    tables = read_profile(directory, num_layers=1)
    decode_us = tuple(tuple(equal_us(blocks, num, kv) for kv in KV) for num in NUMS)
    grid: AttentionGrid = msgspec.structs.replace(
        tables.attention,
        decodes=NUMS,
        decode_kv=KV,
        decode_us=decode_us,
        mixed_us=tuple(
            tuple(
                tuple(tuple(10 + 0.01 * num * kv for kv in KV) for num in tables.attention.mixed_decodes)
                for _ in tables.attention.before
            )
            for _ in tables.attention.chunks
        ),
    )
    return msgspec.structs.replace(tables, attention=grid)


def equal_us(blocks: RowBlocks, num: int, kv: float) -> float:
    tail = 0.0 if blocks.are_split(num) else equal_tail_us(blocks, num, kv)
    return 10 + num * blocks.heads * kv * blocks.shared_us + tail


def skew_rows(blocks: RowBlocks, times: float) -> list[SkewRow]:
    """Measured `times` times and added up."""
    rows = []
    for num, kv in itertools.product(NUMS, (128, 256, 512, 1024)):
        for longer in sorted({1, 2, 3, num // 4, num // 2, num * 3 // 4} & set(range(1, num))):
            lengths = [4 * kv] * longer + [kv] * (num - longer)
            mean = sum(lengths) / num
            equal = equal_us(blocks, num, mean)
            unequal = equal
            if not blocks.are_split(num):
                unequal += tail_us(blocks, lengths) - equal_tail_us(blocks, num, mean)
            rows.append(SkewRow(num, longer, 0, 0, kv, 4 * kv, times * equal, times * unequal))
    return rows


@pytest.mark.parametrize(("processors", "heads"), [(188, 8), (84, 8), (132, 4)])
def test_processors_and_their_speed_are_found_in_the_tables(
    tmp_path: Path, processors: int, heads: int
) -> None:
    blocks = true_blocks(processors, heads)
    grid = tables_of(tmp_path, blocks).attention
    found = fit_blocks(skew_rows(blocks, times=3), grid, heads=heads, scale=3)
    assert found is not None
    assert (found.slots, found.split_below) == (blocks.slots, blocks.split_below)
    assert found.serial_us == pytest.approx(blocks.serial_us, rel=0.05)
    assert found.shared_us == pytest.approx(blocks.shared_us, rel=0.05)


def test_they_are_used_where_they_predict_other_sizes_better(tmp_path: Path) -> None:
    blocks = true_blocks(188, 8)
    tables = tables_of(tmp_path, blocks)
    rows = skew_rows(blocks, times=3)
    found = with_unequal(tables, rows, Device(kv_heads=8, processors=188))
    assert found.blocks is not None
    assert found.skew_alone is not None
    assert found.skew_alone.decodes == (2, 4, 8, 16, 32)  # those that are split
    unknown = with_unequal(tables, rows, Device())
    assert unknown.blocks is None
    assert unknown.skew_alone is not None
    assert unknown.skew_alone.decodes == NUMS


def test_one_size_that_is_not_split_is_enough_and_none_is_not(tmp_path: Path) -> None:
    blocks = true_blocks(188, 4)
    tables = tables_of(tmp_path, blocks)
    found = with_unequal(tables, skew_rows(blocks, times=3), Device(kv_heads=4, processors=188))
    assert found.blocks is not None
    assert found.skew_alone is not None
    assert found.skew_alone.decodes == (2, 4, 8, 16, 32, 64)
    blocks = true_blocks(188, 1)
    tables = tables_of(tmp_path, blocks)
    found = with_unequal(tables, skew_rows(blocks, times=3), Device(kv_heads=1, processors=188))
    assert found.blocks is None
    assert found.skew_alone is not None
    assert found.skew_alone.decodes == NUMS


def test_a_kernel_that_evens_lengths_out_has_no_blocks(tmp_path: Path) -> None:
    """Every batch takes what its sum does, as with kernels that plan their blocks by the lengths."""
    blocks = msgspec.structs.replace(true_blocks(132, 8), serial_us=0.0)
    tables = tables_of(tmp_path, blocks)
    rows = skew_rows(blocks, times=1)
    found = with_unequal(tables, rows, Device(kv_heads=8, processors=132))
    for row in rows:
        if found.blocks is not None:
            lengths = [row.longer_kv] * row.num_longer + [row.kv] * (row.num - row.num_longer)
            assert tail_us(found.blocks, lengths) < 0.03 * row.equal_us


def test_without_rows_nothing_changes(tmp_path: Path) -> None:
    tables = tables_of(tmp_path, true_blocks(84, 8))
    assert with_unequal(tables, [], Device(kv_heads=8)) is tables


@pytest.mark.parametrize(
    ("name", "processors"),
    [
        ("NVIDIA GeForce RTX 4090", 128),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 188),
        ("NVIDIA H100 80GB HBM3", 132),
        ("NVIDIA H100 PCIe", 114),
        ("NVIDIA RTX A6000", 84),
        ("NVIDIA RTX 6000 Ada Generation", 142),
        ("NVIDIA A100-SXM4-80GB", 108),
        ("NVIDIA L40S", 142),
        ("", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_known_devices(name: str, processors: int | None) -> None:
    assert processors_of(name) == processors
