"""Pure: times measured on several grids at once, brought onto one grid.

A profiler that ran twice, with other steps or other bounds, leaves one table: the union of two grids, in
which most combinations of one grid's values with the other's were never measured. What was measured stays as
it is. A combination that was not is interpolated in the smallest cell around it of which every corner was
measured. A function that is linear in every axis comes out exact, whatever the grids.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from math import log

from ksana.errors import ConfigError

Point = tuple[int, ...]
Axes = tuple[tuple[int, ...], ...]

_MAX_GRIDS = 256


def complete_grids(points: Sequence[Point]) -> list[Axes]:
    """The largest grids of which every point is among these (no grid of them lies within another), by their
    axes, each ascending. Raises ConfigError for points in no order at all: too many grids."""
    if not points:
        return []
    return [axes for axes in _grids(frozenset(points)) if all(axes)]


def _grids(points: frozenset[Point]) -> list[Axes]:
    rest: dict[int, set[Point]] = {}
    for first, *others in points:
        rest.setdefault(first, set()).add(tuple(others))
    if points and len(next(iter(points))) == 1:
        return [(tuple(sorted(rest)),)]
    sections = {value: frozenset(others) for value, others in rest.items()}
    found: set[Axes] = set()
    for section in set(sections.values()):
        for axes in _grids(section):
            inside = frozenset(itertools.product(*axes))
            values = tuple(sorted(value for value, others in sections.items() if inside <= others))
            found.add((values, *axes))
            if len(found) > _MAX_GRIDS:
                raise ConfigError(f"its points are on more than {_MAX_GRIDS} different grids")
    kinds = [tuple(frozenset(axis) for axis in axes) for axes in found]
    return [
        axes
        for axes, kind in zip(found, kinds, strict=True)
        if not any(kind != other and all(map(frozenset.issubset, kind, other)) for other in kinds)
    ]


class GridUnion:
    """Times by point, and the grids they are on."""

    def __init__(self, times: Mapping[Point, float]) -> None:
        self._times = times
        self.grids = complete_grids(list(times))

    def at(self, point: Point) -> float | None:
        """What was measured, or what the smallest cell around it says; None where no complete cell is."""
        measured = self._times.get(point)
        if measured is not None:
            return measured
        cells = [cell for axes in self.grids if (cell := _cell(axes, point)) is not None]
        return self._inside(min(cells, key=_width), point) if cells else None

    def from_others(self) -> Iterator[tuple[float, float]]:
        """(what the other grids say, what was measured) at points that only one grid has."""
        inside = [frozenset(itertools.product(*axes)) for axes in self.grids]
        for index, points in enumerate(inside):
            others = frozenset().union(*inside[:index], *inside[index + 1 :])
            alone = points - others
            if not alone or not others:
                continue
            union = GridUnion({point: self._times[point] for point in others})
            for point in sorted(alone):
                predicted = union.at(point)
                if predicted is not None and self._times[point]:
                    yield predicted, self._times[point]

    def _inside(self, cell: Axes, point: Point) -> float:
        """Multilinear; a cell has one value (the point's own) or two on each axis."""
        total = 0.0
        for corner in itertools.product(*cell):
            weight = 1.0
            for ends, end, value in zip(cell, corner, point, strict=True):
                if len(ends) == 2:
                    share = (value - ends[0]) / (ends[1] - ends[0])
                    weight *= share if end == ends[1] else 1.0 - share
            total += weight * self._times[corner]
        return total


def _cell(axes: Axes, point: Point) -> Axes | None:
    cell = []
    for axis, value in zip(axes, point, strict=True):
        above = bisect_left(axis, value)
        if above == len(axis) or (axis[above] != value and above == 0):
            return None
        cell.append((value,) if axis[above] == value else (axis[above - 1], axis[above]))
    return tuple(cell)


def _width(cell: Axes) -> float:
    """Sum over axes of how many times the upper end is the lower one, as a logarithm."""
    return sum(log((ends[-1] + 1) / (ends[0] + 1)) for ends in cell)
