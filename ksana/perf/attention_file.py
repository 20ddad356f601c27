"""Reads `attention.csv`: columns prefill_chunk, kv_prefill, n_decode, kv_decode, time_us (of one layer).

Newer files have decode_q_len, tokens per decode, of which only 1 is read; some have prefill_key instead of
kv_prefill, all keys of the prefill instead of those before it. The rows may be on several grids at once
(`grid_union`), in any order.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path

from ksana.costs.attention_table import AttentionGrid
from ksana.errors import ConfigError
from ksana.perf.csv_numbers import read_lines, read_rows
from ksana.perf.grid_union import GridUnion, Point

_MAX_POINTS = 64
"""On one axis of the grid."""

_MAX_TIMES = 1 << 20
"""Of the grid that all grids of a file are brought onto."""

_MOST_APART = 1.5
"""How many times one time of a point may be another one of it: they are averaged. Beyond it, one of the two
must be wrong."""

_Grid = dict[tuple[int, int, int, int], float]


def read_attention(path: Path) -> AttentionGrid:
    """The grid of `attention.csv`, or one onto which its several grids are brought. Points that the profiler
    had no KV memory for are continued along the KV axis; numbers of decodes that were not measured beside a
    prefill are left out there."""
    times = _filled(path, _attention_times(path))
    if not all(times.values()):
        raise ConfigError(f"{path}: a step took no time")
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


def _attention_times(path: Path) -> _Grid:
    """By chunk, KV before it, decodes and their KV."""
    header, lines = read_lines(path, ("prefill_chunk",))
    if "layer" in header:
        kinds = {line[header["layer"]] for _, line in lines if len(line) > header["layer"]}
        if len(kinds) > 1:
            named = ", ".join(sorted(kinds)[:4])[:80]
            raise ConfigError(f"{path}: more than one kind of attention ({named}); one is read")
    has_keys = "prefill_key" in header
    prefill = "prefill_key" if has_keys else "kv_prefill"
    columns = ("prefill_chunk", prefill, "n_decode", "kv_decode", "time_us")
    others = ("decode_q_len",) if "decode_q_len" in header else ()
    points = []
    for chunk, length, num, kv, us, *decode_tokens in read_rows(path, (*columns, *others)):
        before = length - chunk if has_keys and chunk else length
        if before >= 0 and decode_tokens in ([], [1.0], [] if num else [0.0]):
            points.append((int(chunk), int(before), int(num), int(kv), us))
    times = _averaged(path, points)
    return _on_one_axis(times) if has_keys else times


def _averaged(path: Path, rows: Iterable[tuple[int, int, int, int, float]]) -> _Grid:
    """By point. One that was measured several times has their mean."""
    found: dict[tuple[int, int, int, int], list[float]] = {}
    for *point, us in rows:
        chunk, before, num, kv = point
        found.setdefault((chunk, before, num, kv), []).append(us)
    for at, times in found.items():
        if max(times) > _MOST_APART * min(times):
            raise ConfigError(
                f"{path} has {','.join(map(str, at))} more than once, with times from {min(times):g} to "
                f"{max(times):g} us: leave out the wrong one"
            )
    return {point: sum(times) / len(times) for point, times in found.items()}


_KINDS = ((2, 3), (0, 1), (0, 1, 2, 3))
"""Places in a point that vary: of decodes alone, prefills alone, and both together."""


def _parts(times: _Grid) -> Iterator[tuple[tuple[int, ...], dict[Point, float]]]:
    """By kind of step: the places that vary, and times by what stands there."""
    for places in _KINDS:
        has_prefill, has_decodes = 0 in places, 2 in places
        yield (
            places,
            {
                tuple(point[place] for place in places): us
                for point, us in times.items()
                if (bool(point[0]), bool(point[2])) == (has_prefill, has_decodes)
            },
        )


def _filled(path: Path, times: _Grid) -> _Grid:
    """With what several grids lack of each other, each kind of step on one grid. What no complete cell is
    around stays missing."""
    whole = dict(times)
    for places, part in _parts(times):
        axes = [sorted({point[index] for point in part}) for index in range(len(places))]
        size = prod(map(len, axes))
        if size == len(part):
            continue
        if size > _MAX_TIMES:
            raise ConfigError(f"{path}: its grids together have {size:,} points; {_MAX_TIMES:,} are read")
        union = _union(path, part)
        for values in itertools.product(*axes):
            us = union.at(values)
            if us is not None:
                point = dict(zip(places, values, strict=True))
                whole[point.get(0, 0), point.get(1, 0), point.get(2, 0), point.get(3, 0)] = us
    return whole


def _union(path: Path, part: dict[Point, float]) -> GridUnion:
    try:
        return GridUnion(part)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def grid_errors(path: Path) -> list[float]:
    """Of a file with several grids: by how many percent the others miss what only one of them has measured.
    Empty for one grid. Raises ConfigError."""
    errors = []
    for _, part in _parts(_attention_times(path)):
        for predicted, measured in _union(path, part).from_others():
            errors.append(100 * abs(predicted / measured - 1))
    return errors


def _on_one_axis(times: _Grid) -> _Grid:
    """The same, every chunk with the same lengths before it, those of the smallest one: where a chunk was
    measured at others, on the straight between the two next to it, but no less than its least time."""
    lines: dict[tuple[int, int, int], dict[int, float]] = {}
    for (chunk, before, num, kv), us in times.items():
        lines.setdefault((chunk, num, kv), {})[before] = us
    smallest = min((chunk for chunk, _, _ in lines if chunk), default=0)
    axis = sorted({before for chunk, before, _, _ in times if chunk == smallest})
    if len(axis) > _MAX_POINTS:
        return times  # and will be refused for it
    even: _Grid = {}
    for (chunk, num, kv), line in lines.items():
        points = sorted(line)
        for before in axis if chunk else [0]:
            above = min(max(bisect_left(points, before), 1), len(points) - 1)
            if len(points) == 1 or before in line:
                even[chunk, before, num, kv] = line.get(before, line[points[0]])
                continue
            lower, upper = points[above - 1], points[above]
            share = (before - lower) / (upper - lower)
            time = line[lower] + share * (line[upper] - line[lower])
            even[chunk, before, num, kv] = max(min(line.values()), time)
    return even


def _axis(path: Path, column: str, values: Iterable[int]) -> tuple[int, ...]:
    axis = tuple(sorted(set(values)))
    if len(axis) < 2 or len(axis) > _MAX_POINTS:
        raise ConfigError(f"{path}: {column} needs 2 to {_MAX_POINTS} different values, and has {len(axis)}")
    return axis


def _time(path: Path, times: _Grid, point: tuple[int, int, int, int]) -> float:
    if point not in times:
        raise ConfigError(
            f"{path} lacks the row {','.join(map(str, point))}, "
            "and has no rows around it that form a whole cell"
        )
    return times[point]


def _continued(line: list[float | None], kv_axis: tuple[int, ...]) -> tuple[float, ...]:
    """The line, with what is missing within it on the straight between its neighbours, and what is missing at
    its end on the one through the two points before, which does not fall: more KV takes no less time. Empty
    when its beginning is missing, or all but one point."""
    known = [index for index, us in enumerate(line) if us is not None]
    if len(known) < 2 or known[0] != 0:
        return ()
    whole: list[float] = []
    for index, us in enumerate(line):
        if us is not None:
            whole.append(us)
            continue
        above = bisect_left(known, index)
        if above < len(known):
            left, right = known[above - 1], known[above]
            lower, upper = whole[left], line[right]
            assert upper is not None
            share = (kv_axis[index] - kv_axis[left]) / (kv_axis[right] - kv_axis[left])
            whole.append(lower + share * (upper - lower))
        else:
            slope = max(0.0, whole[-1] - whole[-2]) / (kv_axis[index - 1] - kv_axis[index - 2])
            whole.append(whole[-1] + slope * (kv_axis[index] - kv_axis[index - 1]))
    return tuple(whole)
