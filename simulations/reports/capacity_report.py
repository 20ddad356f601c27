"""The answer of a capacity search: what it is, as a sentence, as a table and as a page."""

from __future__ import annotations

import msgspec

from ksana.perf.charts import LineChart, Series, line_chart
from ksana.perf.html_page import charts, folded, page, table
from simulations.reports.summary import as_json
from simulations.studies.probes import Probe, Question
from simulations.studies.rate_search import Bracket

HEADER = ["requests/s", "seed", "judged", "failed", "TTFT (ms)", "TPOT (ms)", "verdict"]

NAMES = ("one by one", "all at once")
"""Of the first two trials."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. Rates are requests per second."""

    question: Question
    alone: Probe
    """Each request by itself: what cannot be had even then, cannot be had."""
    flood: Probe
    """All at once: what is served per second at most."""
    probes: tuple[Probe, ...]
    brackets: tuple[Bracket, ...]
    """One per seed."""
    rate_per_s: float | None
    """Mean over seeds of the highest rate at which the target held. None: there is no such rate."""
    longer: Probe | None
    """The answer tried with twice as many requests. If it does not hold, a queue still grows at that rate."""
    is_bounded: bool
    """False: the target held at every rate that was tried."""
    limited_by: tuple[str, ...]
    """What broke first, a little above the answer."""

    @property
    def range_per_s(self) -> tuple[float, float]:
        """From the lowest rate that held for one seed to the lowest that broke for another."""
        held = [bracket.holds for bracket in self.brackets if bracket.holds is not None]
        broke = [bracket.breaks for bracket in self.brackets if bracket.breaks is not None]
        return min(held, default=0.0), max(broke, default=float("inf"))


def answer_text(capacity: Capacity) -> str:
    """The answer as a sentence."""
    question = capacity.question
    wanted = (
        f"TTFT {1000 * question.target.ttft_s:g} ms and TPOT {1000 * question.target.tpot_s:g} ms "
        f"for {question.percentile:g} % of requests"
    )
    if capacity.rate_per_s is None:
        if capacity.brackets:
            return f"No rate that was tried keeps {wanted}; too high: {', '.join(capacity.limited_by)}."
        alone = capacity.alone
        causes = [*alone.failures] or [f"{name} too high" for name in alone.broken]
        return f"No rate keeps {wanted}, as requests do not get it even alone: {', '.join(causes)}."
    if not capacity.is_bounded:
        return f"{wanted} hold at any rate; {capacity.rate_per_s:.3g} requests/s is the highest tried."
    low, high = capacity.range_per_s
    num_seeds = len(capacity.brackets)
    border = f"{num_seeds} seed{'s' * (num_seeds > 1)}: the border lies between {low:.3g} and {high:.3g}"
    return (
        f"{capacity.rate_per_s:.3g} requests/s keep {wanted} ({border}). "
        f"Above that too high: {', '.join(capacity.limited_by)}.{_whether_it_lasts(capacity)}"
    )


def _whether_it_lasts(capacity: Capacity) -> str:
    longer = capacity.longer
    if longer is None:
        return ""
    if longer.holds:
        return " It holds for twice as many requests too."
    return (
        f" With twice as many requests {', '.join(longer.broken)} is too high at that rate: "
        "a little less is what lasts; ask for more --requests."
    )


def probe_row(one: Probe, name: str = "") -> list[str]:
    """The cells of HEADER; `name` in the place of the rate."""
    times = ["-" if time_s is None else f"{1000 * time_s:,.1f}" for time_s in (one.ttft_s, one.tpot_s)]
    return [
        name or f"{one.rate_per_s:.4g}",
        str(one.seed),
        f"{one.num_judged:,}",
        f"{one.num_failed:,}",
        *times,
        "holds" if one.holds else f"{', '.join(one.broken)} too high",
    ]


def capacity_page(capacity: Capacity) -> str:
    """Trials as charts and as a table."""
    figures = []
    target = capacity.question.target
    for name, field, most_s in (("TTFT", "ttft_s", target.ttft_s), ("TPOT", "tpot_s", target.tpot_s)):
        points = sorted(
            (one.rate_per_s, 1000 * getattr(one, field))
            for one in capacity.probes
            if getattr(one, field) is not None
        )
        ends = [points[0][0], points[-1][0]] if points else []
        series = [
            Series(name="trials", points=points, dotted=True),
            Series(name="target", points=[(x, 1000 * most_s) for x in ends], colour=1, dashed=True),
        ]
        percentile = f"{capacity.question.percentile:g}th percentile"
        figures.append(
            line_chart(
                LineChart(
                    title=f"{name} at the {percentile}",
                    x_label="requests per second",
                    y_label=f"{name} (ms)",
                    series=series,
                    y_max=4000 * most_s,
                )
            )
        )
    longer = [capacity.longer] if capacity.longer is not None else []
    firsts = zip((capacity.alone, capacity.flood), NAMES, strict=True)
    rows = [probe_row(one, name) for one, name in firsts]
    rows += [probe_row(one) for one in (*capacity.probes, *longer)]
    body = f"<p>{answer_text(capacity)}</p>{charts(figures)}<h2>Trials</h2>{table(HEADER, rows)}"
    return page("Capacity", body + folded("Question", as_json(capacity.question).decode()))
