"""Line and bar charts as inline SVG: no script, readable in light and dark, sized for a page of two columns.

Colours come from the style sheet in `ksana.perf.html_page` (classes c0 to c5).
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from ksana.perf.chart_axes import Axis, short

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 34, 46
NUM_COLOURS = 6
_MAX_POINTS = 800
_MAX_DOTS = 1500
_FEW_DOTS = 200
"""So few are drawn larger, so many as make a cloud are not."""
_LARGEST = 1e15
"""Beyond it a number is taken for a mistake."""

Point = tuple[float, float]


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One line, its points by x. `colour` below NUM_COLOURS."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    dashed: bool = False
    stepped: bool = False
    """A value holds until the next."""
    dotted: bool = False
    """Points without a line."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A vertical line where something happened."""

    x: float
    text: str


class LineChart(msgspec.Struct, frozen=True, kw_only=True):
    """`x_label` and `y_label` say the unit. Axes begin at 0 (or below, where data does), except a logarithmic
    one; they end at `x_max` and `y_max`, or where the data does."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    x_log: bool = False
    """Points at 0 or below are left out."""
    x_max: float | None = None
    y_max: float | None = None


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    value: float
    text: str = ""
    """Beside the bar; the value, if empty."""


def line_chart(chart: LineChart) -> str:
    """The chart as one <figure>. Points that are not finite, or beyond any reason, are left out."""
    series = [(line, _usable(line.points, chart.x_log)) for line in chart.series]
    points = [point for _, usable in series for point in usable]
    x_low = None if chart.x_log else 0.0
    xs = Axis([x for x, _ in points], chart.x_log, _LEFT, WIDTH - _RIGHT, low=x_low, high=chart.x_max)
    ys = Axis([y for _, y in points], False, HEIGHT - _BOTTOM, _TOP, high=chart.y_max, low=0.0)
    parts = [*_x_grid(xs, chart.x_label), *_y_grid(ys, chart.y_label)]
    for mark in chart.marks:
        if xs.low <= mark.x <= xs.high:
            x = xs.place(mark.x)
            parts.append(
                f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}">'
                f"<title>{escape(mark.text)}</title></line>"
            )
    for line, usable in series:
        thinned = usable[:: -(-len(usable) // _MAX_DOTS)] if line.dotted and usable else _thin(usable)
        parts.append(_line(line, thinned, xs, ys))
    if not points:
        parts.append(_text(WIDTH / 2, HEIGHT / 2, "no data", "middle"))
    return _figure(chart.title, parts, HEIGHT, [line for line, _ in series])


def bar_chart(title: str, bars: Sequence[Bar]) -> str:
    """Horizontal bars, longest possible for the largest value, as one <figure>."""
    largest = max((bar.value for bar in bars), default=0.0) or 1.0
    left, row, parts = 190, 22, []
    for index, bar in enumerate(bars):
        y = _TOP + index * row
        length = (WIDTH - left - 120) * max(0.0, bar.value) / largest
        parts.append(_text(left - 8, y + 14, bar.name[:28], "end"))
        parts.append(
            f'<rect class="fill c0" x="{left}" y="{y + 3}" width="{length:.1f}" height="{row - 7}"/>'
        )
        parts.append(_text(left + length + 6, y + 14, bar.text or short(bar.value), "start"))
    return _figure(title, parts, _TOP + row * len(bars) + 12, [])


def cumulative(values: ArrayLike) -> list[Point]:
    """The share of values (in percent) that are at most x, thinned to what a chart can show."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    num = len(ordered)
    if not num:
        return []
    indices = np.unique(np.linspace(0, num - 1, min(num, 401)).round().astype(np.int64))
    return list(zip(ordered[indices].tolist(), (100 * (indices + 1) / num).tolist(), strict=True))


def _usable(points: Sequence[Point], is_log: bool) -> list[Point]:
    least_x = 1 / _LARGEST if is_log else -_LARGEST
    return [(x, y) for x, y in points if least_x <= x <= _LARGEST and -_LARGEST <= y <= _LARGEST]


def _thin(points: list[Point]) -> list[Point]:
    """First, lowest, highest and last of each stretch, so that peaks stay where they are."""
    if len(points) <= _MAX_POINTS:
        return points
    kept: list[Point] = []
    size = -(-len(points) * 4 // _MAX_POINTS)
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        chosen = {
            stretch[0],
            min(stretch, key=lambda index: points[index][1]),
            max(stretch, key=lambda index: points[index][1]),
            stretch[-1],
        }
        kept += [points[index] for index in sorted(chosen)]
    return kept


def _line(line: Series, points: list[Point], xs: Axis, ys: Axis) -> str:
    title = f"<title>{escape(line.name)}</title>"
    placed = [(xs.place(x), ys.place(y)) for x, y in points]
    colour = f"c{line.colour % NUM_COLOURS}"
    if line.dotted:
        dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in placed)
        few = " few" if len(placed) <= _FEW_DOTS else ""
        return f'<path class="dots{few} {colour}" d="{dots}">{title}</path>'
    path, before = [], None
    for x, y in placed:
        if line.stepped and before is not None:
            path.append(f"H{x:.1f}V{y:.1f}")
        else:
            path.append(f"{'L' if before is not None else 'M'}{x:.1f} {y:.1f}")
        before = y
    dashed = " dashed" if line.dashed else ""
    return f'<path class="line {colour}{dashed}" d="{"".join(path)}">{title}</path>'


def _x_grid(axis: Axis, label: str) -> list[str]:
    bottom = HEIGHT - _BOTTOM
    parts = []
    for tick in axis.ticks:
        x = axis.place(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(_text(x, bottom + 16, short(tick), "middle"))
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 10, label, "middle"))
    return parts


def _y_grid(axis: Axis, label: str) -> list[str]:
    parts = []
    for tick in axis.ticks:
        y = axis.place(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 6, y + 4, short(tick), "end"))
    middle = f"translate(14 {HEIGHT / 2:.0f}) rotate(-90)"
    parts.append(f'<text transform="{middle}" text-anchor="middle">{escape(label)}</text>')
    return parts


def _figure(title: str, parts: Sequence[str], height: float, legend: Sequence[Series]) -> str:
    entries = []
    for line in legend if len(legend) > 1 else ():
        kind = "dots few" if line.dotted else "line dashed" if line.dashed else "line"
        shape = "M4 5h0M12 5h0M20 5h0" if line.dotted else "M2 5h20"
        path = f'<path class="{kind} c{line.colour % NUM_COLOURS}" d="{shape}"/>'
        sample = f'<svg width="24" height="10" aria-hidden="true">{path}</svg>'
        entries.append(f"<span>{sample} {escape(line.name)}</span>")
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f'<text class="title" x="{_LEFT}" y="18">{escape(title)}</text>{"".join(parts)}</svg>'
        f"<figcaption>{' '.join(entries)}</figcaption></figure>"
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
