"""Reads a directory of per-layer profile tables into a cost.

Files: `dense.csv` (layer, tokens, time_us), `per_sequence.csv` (layer, sequences, time_us) and
`attention.csv` (prefill_chunk, kv_prefill, n_decode, kv_decode, time_us), as the profilers of LLMServingSim
write them. `meta.json`, if there is one, says how the engine of a recorded run padded its steps.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from ksana.costs.attention_table import AttentionGrid
from ksana.costs.profile_cost import LayerTable, ProfileTables
from ksana.errors import ConfigError

MAX_FILE_BYTES = 64 << 20
_MAX_SIZE = 1 << 24
_ONCE_PER_STEP = frozenset({"embedding", "final_layernorm", "lm_head", "sampler"})
_PER_LAYER = {"layernorm": 2}
"""Before attention and before the MLP. Every other kind stands once in a decoder layer."""

_Grid = dict[tuple[int, int, int, int], float]


def read_profile(directory: Path, *, num_layers: int) -> ProfileTables:
    """Raises ConfigError, with file and line, for anything that is not such a directory."""
    if num_layers < 1:
        raise ConfigError(f"a model has at least one layer, not {num_layers}")
    return ProfileTables(
        num_layers=num_layers,
        dense=_layers(directory / "dense.csv", "tokens", num_layers),
        per_sequence=_layers(directory / "per_sequence.csv", "sequences", num_layers),
        attention=read_attention(directory / "attention.csv"),
        padded_sizes=_padded_sizes(directory / "meta.json"),
    )


def read_rows(path: Path, columns: tuple[str, ...]) -> list[tuple[float, ...]]:
    """Those columns of a CSV file as numbers, in order. Each at least 0."""
    header, lines = _lines(path, columns)
    rows = []
    for number, line in lines:
        try:
            row = tuple(float(line[header[column]]) for column in columns)
        except (ValueError, IndexError):
            raise ConfigError(f"{path}, line {number}: expected numbers in {', '.join(columns)}") from None
        if not all(0 <= value < _MAX_SIZE * 64 for value in row):
            raise ConfigError(f"{path}, line {number}: a value is negative, not a number, or absurd")
        rows.append(row)
    return rows


def _lines(path: Path, columns: Iterable[str]) -> tuple[Mapping[str, int], list[tuple[int, list[str]]]]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB")
    try:
        lines = list(csv.reader(io.StringIO(text.decode())))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: {error}") from None
    header = {name: index for index, name in enumerate(lines[0])} if lines else {}
    for column in columns:
        if column not in header:
            raise ConfigError(f"{path} has no column {column}")
    return header, [(number, line) for number, line in enumerate(lines[1:], 2) if line]


def _layers(path: Path, size_column: str, num_layers: int) -> tuple[LayerTable, ...]:
    header, lines = _lines(path, ("layer", size_column, "time_us"))
    values = read_rows(path, (size_column, "time_us"))
    by_name: dict[str, dict[int, float]] = {}
    for (_, line), (size, us) in zip(lines, values, strict=True):
        by_name.setdefault(line[header["layer"]], {})[int(size)] = us
    if not by_name:
        raise ConfigError(f"{path} has no rows")
    return tuple(
        LayerTable(
            name=name,
            per_step=1 if name in _ONCE_PER_STEP else _PER_LAYER.get(name, 1) * num_layers,
            sizes=tuple(sorted(times)),
            us=tuple(times[size] for size in sorted(times)),
        )
        for name, times in by_name.items()
    )


def read_attention(path: Path) -> AttentionGrid:
    """The grid of `attention.csv`. Points that the profiler had no KV memory for are continued along the KV
    axis; numbers of decodes that were not measured beside a prefill are left out there."""
    times: _Grid = {}
    for row in read_rows(path, ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")):
        times[int(row[0]), int(row[1]), int(row[2]), int(row[3])] = row[4]
    chunks = _axis(path, "prefill_chunk", (c for c, _, _, _ in times if c))
    before = _axis(path, "kv_prefill", (b for c, b, _, _ in times if c))
    kv_axis = _axis(path, "kv_decode", (kv for _, _, num, kv in times if num))
    decodes = _axis(path, "n_decode", (num for c, _, num, _ in times if num and not c))
    beside = _axis(path, "n_decode", (num for c, _, num, _ in times if num and c))
    prefill_us = tuple(tuple(_time(path, times, (c, b, 0, 0)) for b in before) for c in chunks)
    lines = {
        (chunk, b, num): _continued([times.get((chunk, b, num, kv)) for kv in kv_axis], kv_axis)
        for chunk, b in [(0, 0), *((c, b) for c in chunks for b in before)]
        for num in (beside if chunk else decodes)
    }
    decodes = tuple(num for num in decodes if lines[0, 0, num])
    beside = tuple(num for num in beside if all(lines[c, b, num] for c in chunks for b in before))
    if len(decodes) < 2 or len(beside) < 2:
        raise ConfigError(f"{path}: too few numbers of decodes were measured at all other sizes")
    return AttentionGrid(
        decodes=decodes,
        decode_kv=kv_axis,
        decode_us=tuple(lines[0, 0, num] for num in decodes),
        chunks=chunks,
        before=before,
        prefill_us=prefill_us,
        mixed_decodes=beside,
        mixed_us=tuple(
            tuple(tuple(lines[chunk, b, num] for num in beside) for b in before) for chunk in chunks
        ),
    )


def _axis(path: Path, column: str, values: Iterable[int]) -> tuple[int, ...]:
    axis = tuple(sorted(set(values)))
    if len(axis) < 2 or len(axis) > 64:
        raise ConfigError(f"{path}: {column} needs 2 to 64 different values, and has {len(axis)}")
    return axis


def _time(path: Path, times: _Grid, point: tuple[int, int, int, int]) -> float:
    if point not in times:
        raise ConfigError(f"{path} lacks the row {','.join(map(str, point))}")
    return times[point]


def _continued(line: list[float | None], kv_axis: tuple[int, ...]) -> tuple[float, ...]:
    """The line, with what is missing at its end on the straight through the two points before. Empty when it
    has a gap, or fewer than two points."""
    known = [us for us in line if us is not None]
    if len(known) < 2 or line[: len(known)] != known:
        return ()
    for index in range(len(known), len(line)):
        slope = (known[-1] - known[-2]) / (kv_axis[index - 1] - kv_axis[index - 2])
        known.append(known[-1] + slope * (kv_axis[index] - kv_axis[index - 1]))
    return tuple(known)


class _Compilation(msgspec.Struct):
    cudagraph_capture_sizes: list[int] | None = None


class _Resolved(msgspec.Struct):
    compilation_config: _Compilation | None = None


class _Meta(msgspec.Struct):
    resolved_config: _Resolved | None = None


def _padded_sizes(path: Path) -> tuple[int, ...]:
    """Sizes of captured CUDA graphs, from the settings of the recorded run; none without that file."""
    if not path.exists():
        return ()
    try:
        meta = msgspec.json.decode(path.read_bytes()[:MAX_FILE_BYTES], type=_Meta)
    except (msgspec.DecodeError, OSError) as error:
        raise ConfigError(f"{path}: {error}") from None
    compilation = meta.resolved_config.compilation_config if meta.resolved_config is not None else None
    sizes = compilation.cudagraph_capture_sizes if compilation is not None else None
    return tuple(sorted({size for size in sizes or () if size > 0}))
