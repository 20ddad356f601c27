"""What `skew.csv` says of decodes of unequal KV lengths, brought into a profile's tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from ksana.costs.attention_table import AttentionTable
from ksana.costs.extrapolation import Extrapolation
from ksana.costs.profile_cost import ProfileTables
from ksana.costs.row_blocks import RowBlocks
from ksana.costs.skew_table import SkewRates, SkewTable
from ksana.perf.block_fit import block_errors, fit_blocks
from ksana.perf.skew_rates import SkewRow, rates_of, scale_of

_MOST_LEFT = 0.5
"""Of the error that equal lengths have."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """What the tables do not tell of the device and the model. None: unknown."""

    kv_heads: int | None = None
    """Of one device: with tensor parallelism its share."""
    processors: int | None = None


def with_unequal(tables: ProfileTables, rows: Sequence[SkewRow], device: Device) -> ProfileTables:
    """The tables with one of two rules for decodes alone: blocks on processors (`ksana.costs.row_blocks`), or
    rates by numbers of decodes (`skew_table`), which know nothing of the kernel. It is the one that better
    predicts batches of a size it has not seen, which is what most batches are. Beside a prefill it is rates.
    """
    if not rows:
        return tables
    table = AttentionTable(tables.attention, Extrapolation(allowed=True))
    scale = scale_of(rows, table)
    rates, beside_prefill = rates_of(rows, scale)
    decodes = [row for row in rows if not row.tokens]
    blocks = _fitted(tables, decodes, device, scale)
    alone: SkewRates | None = rates
    if blocks is not None and _predicts_better(tables, decodes, device, scale, blocks):
        alone = _only(rates, [num for num in rates.decodes if blocks.are_split(num)])
    else:
        blocks = None
    return msgspec.structs.replace(
        tables, skew_alone=alone, skew_beside_prefill=beside_prefill, blocks=blocks
    )


def _fitted(tables: ProfileTables, rows: Sequence[SkewRow], device: Device, scale: float) -> RowBlocks | None:
    if device.kv_heads is None:
        return None
    return fit_blocks(
        rows, tables.attention, heads=device.kv_heads, scale=scale, processors=device.processors
    )


def _predicts_better(
    tables: ProfileTables, rows: Sequence[SkewRow], device: Device, scale: float, blocks: RowBlocks
) -> bool:
    """Each number of decodes from the others, as far as it is not split. With only one that is not, what it
    tells must explain most of what equal lengths leave unexplained."""
    whole = [row for row in rows if not blocks.are_split(row.num)]
    nums = sorted({row.num for row in whole})
    if len(nums) == 1:
        explained = statistics.fmean(block_errors(blocks, whole, scale))
        return explained <= _MOST_LEFT * statistics.fmean(
            abs(row.equal_us / row.skewed_us - 1) for row in whole
        )
    of_blocks: list[float] = []
    of_rates: list[float] = []
    for num in nums:
        seen = [row for row in rows if row.num != num]
        checked = [row for row in rows if row.num == num]
        found = _fitted(tables, seen, device, scale)
        if found is None or found.are_split(num):
            return False
        of_blocks += block_errors(found, checked, scale)
        rates = SkewTable(rates_of(seen, scale)[0])
        for row in checked:
            added = scale * rates.microseconds(row.shape(equal=False).decode_lengths)
            of_rates.append(abs((row.equal_us + added) / row.skewed_us - 1))
    return bool(of_blocks) and statistics.fmean(of_blocks) <= statistics.fmean(of_rates)


def _only(rates: SkewRates, nums: Sequence[int]) -> SkewRates | None:
    if not nums:
        return None
    kept = [rates.decodes.index(num) for num in nums]
    return SkewRates(
        decodes=tuple(nums),
        longer=tuple(rates.longer[index] for index in kept),
        us_per_token=tuple(rates.us_per_token[index] for index in kept),
    )
