"""Finds how a device works through blocks of unequal decodes (`ksana.costs.row_blocks`), from `skew.csv`.

Found are the speed of one processor alone, from the grid of equal lengths that of all together, and, for a
device whose name says nothing, how many processors it has: those are tried that devices have, with one block
or two at a time on each. (The tables tell them apart: for an RTX PRO 6000 they say 188, which it has, for an
RTX 4090 128 and 132 are equally good, and it has 128.)
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import msgspec

from ksana.costs.attention_table import AttentionGrid
from ksana.costs.row_blocks import RowBlocks, equal_tail_us, idle_us, last_spans, tail_us
from ksana.perf.skew_rates import SkewRow

NUM_PROCESSORS = (
    *(20, 28, 30, 40, 46, 48, 56, 58, 60, 64, 66, 68, 72, 76, 80, 82, 84, 96, 100, 104, 108, 110, 114),
    *(120, 128, 132, 142, 144, 148, 152, 160, 170, 188, 192, 228, 256, 304),
)
"""Multiprocessors of the devices of the last ten years."""

_MAX_SCANNED = 48
"""Rows that all numbers of processors are tried with; the best few are tried with all."""
_MOST_ROWS = 256
_LONGEST = 8192
_FULL = 0.8
"""FlashAttention 2 leaves rows whole when they fill so much of two blocks per processor (its
num_splits_heuristic, which is public)."""
_SPEEDS = tuple(4 * 1.07**index for index in range(64))
"""Tried: so many blocks at a time are as fast as the memory."""


def fit_blocks(
    rows: Sequence[SkewRow],
    grid: AttentionGrid,
    *,
    heads: int,
    scale: float,
    processors: int | None = None,
) -> RowBlocks | None:
    """The best description, or None where there is too little to tell. `rows`: of decodes alone. `scale`:
    their times are so many times those of the grid. `processors`: of the device, if that is known."""
    rows = [row for row in rows if row.num <= _MOST_ROWS and row.longer_kv <= _LONGEST]
    shared_us = _shared_us(grid, heads)
    if len(rows) < 8 or shared_us <= 0:
        return None
    few = rows[:: max(1, len(rows) // _MAX_SCANNED)]
    tried = []
    for num in NUM_PROCESSORS if processors is None else (processors,):
        for at_once in (1, 2):
            blocks = RowBlocks(
                heads=heads,
                slots=num * at_once,
                serial_us=0.0,
                shared_us=shared_us,
                split_below=round(_FULL * 2 * num),
            )
            if any(not blocks.are_split(row.num) for row in few):
                tried.append((*_best_speed(blocks, few, scale), blocks))
    if not tried:
        return None
    tried.sort(key=lambda one: one[0])
    finalists = [(*_best_speed(blocks, rows, scale), blocks) for _, _, blocks in tried[:3]]
    _, serial_us, blocks = min(finalists, key=lambda one: one[0])
    return msgspec.structs.replace(blocks, serial_us=serial_us)


def block_errors(blocks: RowBlocks, rows: Sequence[SkewRow], scale: float) -> Iterator[float]:
    """Relative errors of whole batches, predicted from the measured time of equal lengths."""
    for row in rows:
        if not blocks.are_split(row.num):
            added = tail_us(blocks, _lengths(row)) - equal_tail_us(blocks, row.num, _mean(row))
            yield abs((row.equal_us + scale * added) / row.skewed_us - 1)


def _shared_us(grid: AttentionGrid, heads: int) -> float:
    """Per token and head: what the largest batches take more for longer KV. The least of three, since one
    whose last round of blocks is nearly empty takes more."""
    longer = grid.decode_kv[-1] - grid.decode_kv[-2]
    return min(
        (times[-1] - times[-2]) / longer / (num * heads)
        for num, times in zip(grid.decodes[-3:], grid.decode_us[-3:], strict=True)
    )


def _best_speed(blocks: RowBlocks, rows: Sequence[SkewRow], scale: float) -> tuple[float, float]:
    """(mean relative error over all rows, serial_us)."""
    split_errors = [abs(row.equal_us / row.skewed_us - 1) for row in rows if blocks.are_split(row.num)]
    whole = [
        (row, last_spans(blocks.heads, blocks.slots, _lengths(row)), _mean(row))
        for row in rows
        if not blocks.are_split(row.num)
    ]
    errors = []
    for factor in _SPEEDS:
        one = msgspec.structs.replace(blocks, serial_us=factor * blocks.shared_us)
        total = sum(split_errors)
        for row, spans, mean in whole:
            added = idle_us(spans, one.serial_us, one.shared_us) - equal_tail_us(one, row.num, mean)
            total += abs((row.equal_us + scale * added) / row.skewed_us - 1)
        errors.append((total / len(rows), one.serial_us))
    return min(errors)


def _lengths(row: SkewRow) -> list[int]:
    """In the order of that profiler, which puts the longer ones first."""
    return [row.longer_kv] * row.num_longer + [row.kv] * (row.num - row.num_longer)


def _mean(row: SkewRow) -> float:
    return statistics.fmean(_lengths(row))
