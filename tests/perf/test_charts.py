"""Charts: well-formed, within their frame, labelled at round numbers, and safe against any text."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana.perf.chart_axes import Axis, short
from ksana.perf.charts import HEIGHT, WIDTH, Bar, LineChart, Mark, Series, bar_chart, cumulative, line_chart
from ksana.perf.html_page import charts, folded, page, table

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


def chart(*series: Series, **fields: object) -> ElementTree.Element:
    made = LineChart(title="a <chart> & more", x_label="time (s)", y_label="share (%)", series=series)
    for name, value in fields.items():
        made = LineChart(**{n: getattr(made, n) for n in made.__struct_fields__} | {name: value})
    return ElementTree.fromstring(line_chart(made))


def path_of(figure: ElementTree.Element, kind: str) -> str:
    return next(path.attrib["d"] for path in figure.iter("path") if path.attrib["class"].startswith(kind))


@given(points=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=30), is_log=st.booleans(), stepped=st.booleans())
def test_whatever_the_numbers_are_the_line_stays_in_its_frame(
    points: list[tuple[float, float]], is_log: bool, stepped: bool
) -> None:
    figure = chart(Series(name="one", points=sorted(points, key=str), stepped=stepped), x_log=is_log)
    path = path_of(figure, "line")
    assert "nan" not in path
    assert "inf" not in path
    for x in re.findall(r"[MLH]([\d.]+)", path):
        assert 0 <= float(x) <= WIDTH
    for y in re.findall(r"[\d.] ([\d.]+)|V([\d.]+)", path):
        assert 0 <= float(y[0] or y[1]) <= HEIGHT


def test_where_points_stand() -> None:
    figure = chart(Series(name="one", points=[(0.0, 0.0), (10.0, 50.0), (10.0, 100.0)]))
    (x0, y0), (x1, y1), (x2, y2) = [
        tuple(map(float, pair.split())) for pair in re.split("[ML]", path_of(figure, "line"))[1:]
    ]
    assert x0 < x1 == x2
    assert y1 == pytest.approx((y0 + y2) / 2)
    assert y0 > y2  # downwards on a page


def test_titles_labels_marks_and_legend_are_there_and_escaped() -> None:
    series = [Series(name=f"<b>{k}", points=[(0.0, 1.0), (1.0, 2.0)], colour=k) for k in range(2)]
    marks = [Mark(x=0.5, text="<crash>"), Mark(x=9.0, text="outside")]
    text = line_chart(LineChart(title="<t>", x_label="time (s)", y_label="n & m", series=series, marks=marks))
    ElementTree.fromstring(text)
    assert text.count("&lt;b&gt;1") == 2  # in the legend and at the line
    for part in ("&lt;t&gt;", "time (s)", "n &amp; m", "&lt;crash&gt;"):
        assert part in text
    assert "outside" not in text


def test_a_peak_survives_thinning() -> None:
    points = [(float(k), 1.0) for k in range(100_000)]
    points[54_321] = (54_321.0, 9.0)
    path = path_of(chart(Series(name="one", points=points)), "line")
    assert len(path) < 20_000
    top = min(float(y) for y in re.findall(r" ([\d.]+)", path))
    assert top < HEIGHT / 4


def test_dots_are_thinned_evenly() -> None:
    points = [(float(k), float(k % 10 < 1)) for k in range(100_003)]
    path = path_of(chart(Series(name="one", points=points, dotted=True)), "dots")
    heights = [float(y) for y in re.findall(r" ([\d.]+)h0", path)]
    assert 1000 < len(heights) <= 1500
    share_high = sum(height == min(heights) for height in heights) / len(heights)
    assert share_high == pytest.approx(0.1, abs=0.02)


@given(low=st.floats(0, 1e12), span=st.floats(1e-3, 1e12))
def test_ticks_are_few_and_round(low: float, span: float) -> None:
    axis = Axis([low, low + span], False, 0, 100)
    assert 2 <= len(axis.ticks) <= 12
    assert all(axis.low - 1e-6 * span <= tick <= axis.high * (1 + 1e-9) for tick in axis.ticks)


def test_a_logarithmic_axis() -> None:
    axis = Axis([0.002, 30.0], True, 0, 100)
    assert [tick for tick in axis.ticks if math.log10(tick) % 1 < 1e-9] == pytest.approx([0.01, 0.1, 1, 10])
    assert axis.place(0.002) == 0
    assert axis.place(math.sqrt(0.002 * 30)) == pytest.approx(50)


def test_cumulative_ends_at_a_hundred() -> None:
    assert cumulative([3.0, 1.0, 2.0]) == [
        (1.0, pytest.approx(100 / 3)),
        (2.0, pytest.approx(200 / 3)),
        (3.0, 100),
    ]
    many = cumulative([float(k) for k in range(100_000)])
    assert len(many) <= 401
    assert many[-1] == (99_999.0, 100.0)
    assert cumulative([]) == []


def test_bars() -> None:
    figure = ElementTree.fromstring(
        bar_chart("by <operator>", [Bar(name="a&b", value=3), Bar(name="c", value=1)])
    )
    first, second = (float(bar.attrib["width"]) for bar in figure.iter("rect"))
    assert first == pytest.approx(3 * second, rel=0.01)
    ElementTree.fromstring(bar_chart("none", []))


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.25, "0.25"), (12345.0, "12.35k"), (2.5e6, "2.5M")]
)
def test_short_numbers(value: float, text: str) -> None:
    assert short(value) == text


def test_a_page_fetches_nothing_and_runs_nothing() -> None:
    body = charts([line_chart(LineChart(title="t", x_label="x", y_label="y", series=()))])
    body += table(["what", "s"], [["<i>", "1"]]) + folded("settings", "{<}")
    text = page("<script>alert(1)</script>", body)
    assert "<script" not in text
    assert "http" not in text
    assert "prefers-color-scheme:dark" in text
    assert '<th scope="row">&lt;i&gt;</th><td>1</td>' in text
