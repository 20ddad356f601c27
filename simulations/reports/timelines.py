"""Charts of what happened over time, of one run or of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from ksana.perf.charts import NUM_COLOURS, LineChart, Mark, Point, Series
from simulations.reports.metrics import EngineSample, RunRecord
from simulations.reports.summary import ttft_s

_MAX_ENGINE_LINES = NUM_COLOURS
_NUM_WINDOWS = 80
"""Of a chart that shows a rate over time."""


def timelines(records: Sequence[RunRecord]) -> list[LineChart | None]:
    """None in the place of a chart that would be empty."""
    return [
        _ttft_over_time(records),
        *_queues(records),
        _uses(records, "fa_use", "KV cache in use"),
        _uses(records, "swa_use", "SWA cache in use"),
        _hit_rate(records),
        _tokens_per_step(records),
    ]


def _ttft_over_time(records: Sequence[RunRecord]) -> LineChart | None:
    series = []
    for index, record in enumerate(records):
        points = [
            (request.arrival_s, waited_s)
            for request in record.requests
            if (waited_s := ttft_s(request)) is not None
        ]
        if points:
            name = run_name(record, records, "requests")
            series.append(Series(name=name, points=points, colour=index, dotted=True))
    if not series:
        return None
    return _over_time("Time to first token, by arrival", "TTFT (s)", series, records)


def _queues(records: Sequence[RunRecord]) -> list[LineChart | None]:
    """One chart of a single run; of several, running and waiting apart."""
    num_running, num_waiting = attrgetter("num_running"), attrgetter("num_waiting")
    if len(records) > 1:
        running = _totals("Running requests", num_running, records)
        return [running, _totals("Waiting requests", num_waiting, records)]
    lines = [Series(name="running", points=sums(records[0], num_running), stepped=True)]
    lines.append(Series(name="waiting", points=sums(records[0], num_waiting), colour=1, stepped=True))
    loading = sums(records[0], attrgetter("num_loading"))
    if any(num for _, num in loading):
        lines.append(Series(name="loading from the remote cache", points=loading, colour=2, stepped=True))
    return [_over_time("Running and waiting requests", "requests", lines, records)]


def _totals(title: str, value: Callable[[EngineSample], float], records: Sequence[RunRecord]) -> LineChart:
    lines = [
        Series(name=record.title, points=sums(record, value), colour=index, stepped=True)
        for index, record in enumerate(records)
    ]
    return _over_time(title, "requests", lines, records)


def _uses(records: Sequence[RunRecord], field: str, title: str) -> LineChart | None:
    """One line per engine where they are few, else their mean."""

    def use(sample: EngineSample) -> float:
        return 100 * float(getattr(sample, field))

    if not any(use(sample) for record in records for engine in record.engines for sample in engine.samples):
        return None
    if len(records) == 1 and 1 < len(records[0].engines) <= _MAX_ENGINE_LINES:
        engines = records[0].engines
        lines = [
            Series(
                name=engine.name,
                points=[(sample.at_s, use(sample)) for sample in engine.samples],
                colour=index,
                stepped=True,
            )
            for index, engine in enumerate(engines)
        ]
    else:
        lines = []
        for index, record in enumerate(records):
            mean = [(at_s, total / len(record.engines)) for at_s, total in sums(record, use)]
            name = run_name(record, records, "mean of engines")
            lines.append(Series(name=name, points=mean, colour=index, stepped=True))
    return _over_time(title, "share of blocks (%)", lines, records, y_max=100.0)


def _hit_rate(records: Sequence[RunRecord]) -> LineChart | None:
    lines = []
    for index, record in enumerate(records):
        queried = sums(record, attrgetter("num_queried_tokens"))
        hit = sums(record, attrgetter("num_hit_tokens"))
        if not queried or not queried[-1][1]:
            continue
        lines.append(
            Series(
                name=run_name(record, records, "at that time"),
                points=_rates(hit, queried),
                colour=index,
                stepped=True,
            )
        )
        so_far = [
            (at_s, 100 * num / total) for (at_s, num), (_, total) in zip(hit, queried, strict=True) if total
        ]
        name = run_name(record, records, "since the start", " since the start")
        lines.append(Series(name=name, points=so_far, colour=index, dashed=True))
    if not lines:
        return None
    return _over_time("Prefix cache hit rate", "prompt tokens (%)", lines, records, y_max=100.0)


def _rates(hit: Sequence[Point], queried: Sequence[Point]) -> list[Point]:
    """Percent of hits within each of some windows of equal length in which anything was looked up."""
    stride = max(1, len(hit) // _NUM_WINDOWS)
    points = []
    for start in range(0, len(hit) - 1, stride):
        end = min(start + stride, len(hit) - 1)
        num = queried[end][1] - queried[start][1]
        if num:
            points.append((hit[start][0], 100 * (hit[end][1] - hit[start][1]) / num))
    return points


def _tokens_per_step(records: Sequence[RunRecord]) -> LineChart | None:
    lines = []
    for index, record in enumerate(records):
        steps = [engine.steps for engine in record.engines if engine.steps is not None]
        points = sorted(
            point for log in steps for point in zip(log.start_s, map(float, log.num_tokens), strict=True)
        )
        if points:
            name = run_name(record, records, "steps")
            lines.append(Series(name=name, points=points, colour=index, dotted=True))
    return _over_time("Tokens per step", "tokens", lines, records) if lines else None


def _over_time(
    title: str,
    y_label: str,
    lines: Sequence[Series],
    records: Sequence[RunRecord],
    y_max: float | None = None,
) -> LineChart:
    return LineChart(
        title=title,
        x_label="virtual time (s)",
        y_label=y_label,
        series=lines,
        marks=_marks(records),
        y_max=y_max,
    )


def sums(record: RunRecord, value: Callable[[EngineSample], float]) -> list[Point]:
    """Over engines, which are sampled at the same times."""
    totals: dict[float, float] = {}
    for engine in record.engines:
        for sample in engine.samples:
            totals[sample.at_s] = totals.get(sample.at_s, 0.0) + value(sample)
    return sorted(totals.items())


def _marks(records: Sequence[RunRecord]) -> list[Mark]:
    """Faults of a single run; of several they would not be told apart."""
    if len(records) > 1:
        return []
    return [Mark(x=fault.at_s, text=f"{fault.target}: {fault.text}") for fault in records[0].faults[:200]]


def run_name(record: RunRecord, records: Sequence[RunRecord], alone: str, suffix: str = "") -> str:
    return alone if len(records) == 1 else record.title + suffix
