"""How well profile tables predict what they do not hold: points left out of them, and unequal batches."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from ksana.costs.attention_table import AttentionGrid, AttentionTable
from ksana.costs.cost_file import HeldOutError
from ksana.costs.extrapolation import Extrapolation
from ksana.costs.profile_cost import LayerTable, ProfileCost, ProfileTables
from ksana.costs.step_cost import StepShape
from ksana.perf.skew_rates import SkewRow, halves
from ksana.perf.unequal import Device, with_unequal

T = TypeVar("T")


def profile_errors(tables: ProfileTables, skew: Sequence[SkewRow], device: Device) -> dict[str, HeldOutError]:
    """By kind; a kind that has nothing to hold out is not in it."""
    kinds = {
        "layers, each size from its neighbours": list(_layer_errors((*tables.dense, *tables.per_sequence))),
        "attention, each number of decodes from its neighbours": list(_decode_errors(tables.attention)),
        "attention, each KV length from its neighbours": list(_kv_errors(tables.attention)),
        "attention, each chunk from its neighbours": list(_chunk_errors(tables.attention)),
    }
    unequal = list(_skew_errors(skew, tables, device))
    kinds["attention, decodes of unequal KV lengths"] = [error for row, error in unequal if not row.tokens]
    kinds["attention, the same beside a prefill"] = [error for row, error in unequal if row.tokens]
    return {name: held_out(errors) for name, errors in kinds.items() if errors}


def held_out(errors_pct: Sequence[float]) -> HeldOutError:
    return HeldOutError(
        num_samples=len(errors_pct),
        mean_abs_pct=round(statistics.fmean(errors_pct), 3),
        max_abs_pct=round(max(errors_pct), 3),
    )


def _error_pct(predicted: float, measured: float) -> float:
    return 100 * abs(predicted / measured - 1)


def _layer_errors(layers: Sequence[LayerTable]) -> Iterator[float]:
    """Without a size, the next larger one's time would hold for it. Weighted as layers are: only those that
    take a tenth or more of all are looked at, for the others do not matter."""
    total = sum(layer.per_step * layer.us[-1] for layer in layers)
    for layer in layers:
        if layer.per_step * layer.us[-1] * 10 >= total:
            for us, next_us in zip(layer.us[1:], layer.us[2:], strict=False):
                if us:
                    yield _error_pct(next_us, us)


def _decode_errors(grid: AttentionGrid) -> Iterator[float]:
    for index in range(1, len(grid.decodes) - 1):
        fewer = msgspec.structs.replace(
            grid, decodes=_without(grid.decodes, index), decode_us=_without(grid.decode_us, index)
        )
        table = AttentionTable(fewer, Extrapolation())
        for kv, us in zip(grid.decode_kv, grid.decode_us[index], strict=True):
            yield _error_pct(table.microseconds(_decodes(grid.decodes[index], kv)), us)


def _kv_errors(grid: AttentionGrid) -> Iterator[float]:
    for index in range(1, len(grid.decode_kv) - 1):
        fewer = msgspec.structs.replace(
            grid,
            decode_kv=_without(grid.decode_kv, index),
            decode_us=tuple(_without(row, index) for row in grid.decode_us),
            mixed_us=tuple(
                tuple(tuple(_without(row, index) for row in block) for block in line)
                for line in grid.mixed_us
            ),
        )
        table = AttentionTable(fewer, Extrapolation())
        kv = grid.decode_kv[index]
        for num, row in zip(grid.decodes, grid.decode_us, strict=True):
            yield _error_pct(table.microseconds(_decodes(num, kv)), row[index])
        for chunk, line in zip(grid.chunks, grid.mixed_us, strict=True):
            for before, block in zip(grid.before, line, strict=True):
                for num, row in zip(grid.mixed_decodes, block, strict=True):
                    yield _error_pct(table.of_mixed(chunk, before, num, kv), row[index])


def _chunk_errors(grid: AttentionGrid) -> Iterator[float]:
    for index in range(1, len(grid.chunks) - 1):
        fewer = msgspec.structs.replace(
            grid,
            chunks=_without(grid.chunks, index),
            prefill_us=_without(grid.prefill_us, index),
            mixed_us=_without(grid.mixed_us, index),
        )
        table = AttentionTable(fewer, Extrapolation())
        for before, us in zip(grid.before, grid.prefill_us[index], strict=True):
            yield _error_pct(table.of_prefill(grid.chunks[index], before), us)


def _skew_errors(
    rows: Sequence[SkewRow], tables: ProfileTables, device: Device
) -> Iterator[tuple[SkewRow, float]]:
    """By how much more a batch of unequal lengths takes than one of the mean length: predicted for each half
    of the rows with what the other half tells."""
    for learned, checked in halves(rows):
        cost = ProfileCost(with_unequal(tables, learned, device), allow_extrapolation=True)
        for row in checked:
            equal, unequal = (cost.attention_us(row.shape(equal=is_equal)) for is_equal in (True, False))
            yield row, _error_pct(unequal / equal, row.skewed_us / row.equal_us)


def _decodes(num: int, kv: int) -> StepShape:
    return StepShape(
        num_tokens=num,
        num_rows=num,
        num_samples=num,
        num_decodes=num,
        decode_kv=num * kv,
        max_decode_kv=kv,
    )


def _without(values: tuple[T, ...], index: int) -> tuple[T, ...]:
    return values[:index] + values[index + 1 :]
