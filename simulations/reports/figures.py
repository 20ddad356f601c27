"""Charts of one run, or of several laid over each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ksana.perf.charts import LineChart, Series, cumulative, line_chart
from simulations.reports.metrics import RequestRecord, RunRecord
from simulations.reports.summary import itls_s, latency_s, tpot_s, ttft_s, values
from simulations.reports.timelines import run_name, timelines

Times = Callable[[Sequence[RequestRecord]], NDArray[np.float64]]


def _each(time_s: Callable[[RequestRecord], float | None]) -> Times:
    return lambda requests: values(map(time_s, requests))


DISTRIBUTIONS: tuple[tuple[str, Times], ...] = (
    ("Time to first token", _each(ttft_s)),
    ("Time per output token", _each(tpot_s)),
    ("Gap between two tokens", itls_s),
    ("Latency to the last token", _each(latency_s)),
)


def run_figures(records: Sequence[RunRecord]) -> list[str]:
    """Distributions first, then what happened over time. Every chart that has data, as HTML."""
    charts = [_distribution(title, times, records) for title, times in DISTRIBUTIONS]
    return [line_chart(chart) for chart in (*charts, *timelines(records)) if chart is not None]


def _distribution(title: str, times: Times, records: Sequence[RunRecord]) -> LineChart | None:
    by_run = [times([request for request in record.requests if request.is_finished]) for record in records]
    every = np.concatenate(by_run)
    if not len(every):
        return None
    p50, p99, most = np.percentile(every, (50, 99, 100)).tolist()
    is_ms = p99 < 2
    series = [
        Series(
            name=run_name(record, records, "share of requests"),
            points=cumulative(run * (1000 if is_ms else 1)),
            colour=index,
        )
        for index, (record, run) in enumerate(zip(records, by_run, strict=True))
        if len(run)
    ]
    return LineChart(
        title=f"{title} (cumulative)",
        x_label="ms" if is_ms else "s",
        y_label="share (%)",
        series=series,
        x_log=p50 > 0 and most > 20 * p50,
        y_max=100.0,
    )
