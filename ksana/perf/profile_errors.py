"""How well profile tables predict what they do not hold: points left out of them, and unequal batches."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from ksana.costs.attention_table import AttentionGrid, AttentionTable
from ksana.costs.cost_file import HeldOutError
from ksana.costs.extrapolation import Extrapolation
from ksana.costs.profile_cost import LayerTable, ProfileTables
from ksana.costs.step_cost import StepShape
from ksana.perf.profile_tables import read_rows

T = TypeVar("T")

_SKEW_COLUMNS = ("n", "nb", "pc", "kp", "kvs", "kv_big", "t_mean_us", "t_skew_us")


def profile_errors(directory: Path, tables: ProfileTables) -> dict[str, HeldOutError]:
    """By kind; a kind that has nothing to hold out is not in it. Raises ConfigError for a broken skew.csv."""
    kinds = {
        "layers, each size from its neighbours": list(_layer_errors((*tables.dense, *tables.per_sequence))),
        "attention, each number of decodes from its neighbours": list(_decode_errors(tables.attention)),
        "attention, each KV length from its neighbours": list(_kv_errors(tables.attention)),
        "attention, each chunk from its neighbours": list(_chunk_errors(tables.attention)),
    }
    if (directory / "skew.csv").exists():
        kinds["attention, decodes of unequal KV lengths"] = list(
            _skew_errors(directory / "skew.csv", tables.attention)
        )
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


def _skew_errors(path: Path, grid: AttentionGrid) -> Iterator[float]:
    """n decodes, nb of them with kv_big tokens of KV and the rest with kvs, beside a prefill or alone: by how
    much more that took than n decodes of the mean length, since the file may hold sums over several runs."""
    table = AttentionTable(grid, Extrapolation(allowed=True))
    for num, num_big, tokens, before, kv, kv_big, mean_us, skew_us in read_rows(path, _SKEW_COLUMNS):
        if not (num and mean_us and skew_us):
            continue
        decode_kv = int(num_big * kv_big + (num - num_big) * kv)
        prefills = ((int(tokens), int(before)),) if tokens else ()
        skewed, equal = (
            table.microseconds(
                StepShape(
                    num_tokens=int(tokens + num),
                    num_rows=int(num) + len(prefills),
                    num_samples=int(num),
                    prefills=prefills,
                    num_decodes=int(num),
                    decode_kv=decode_kv,
                    max_decode_kv=max_kv,
                )
            )
            for max_kv in (int(kv_big), round(decode_kv / num))
        )
        yield _error_pct(skewed / equal, skew_us / mean_us)


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
