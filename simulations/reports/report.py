"""Writes what a run was like: `result.json`, `report.html` for people and `trace.json` for Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import msgspec

from ksana.atomic_file import write_atomically
from ksana.errors import ConfigError
from ksana.perf.html_page import charts, folded, page, table
from simulations.reports.chrome_trace import chrome_trace
from simulations.reports.figures import run_figures
from simulations.reports.metrics import RunRecord
from simulations.reports.summary import Distribution, Summary, Target, as_json, summarise

TIMES = {
    "ttft_s": "time to first token",
    "ttft_from_scheduled_s": "first token since scheduled",
    "queue_s": "time in the queue",
    "tpot_s": "time per output token",
    "itl_s": "gap between two tokens",
    "latency_s": "latency to the last token",
}
"""Fields of a summary that are distributions, as people say them."""

FIGURES = ("mean", "p50", "p90", "p99", "max")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What is in `result.json`."""

    summary: Summary
    settings: dict[str, Any]


def write_report(
    out_dir: Path, record: RunRecord, title: str | None = None, target: Target | None = None
) -> Summary:
    """Write all three into `out_dir`, which is made if need be. Raises ConfigError if that cannot be done."""
    summary = summarise(record, target)
    write_file(out_dir / "result.json", as_json(Result(summary=summary, settings=record.settings)))
    write_file(out_dir / "report.html", report_page(record, summary, title).encode())
    write_file(out_dir / "trace.json", chrome_trace(record))
    return summary


def report_page(record: RunRecord, summary: Summary, title: str | None = None) -> str:
    """The page of one run."""
    body = [f"<p>seed {record.seed}{f', message log {record.digest[:16]}' if record.digest else ''}</p>"]
    body.append("<h2>Totals</h2>" + table(["", ""], totals([summary])))
    body.append("<h2>Times</h2>" + times_table([summary]))
    body.append("<h2>Charts</h2>" + charts(run_figures([record])))
    if record.faults:
        rows = [[f"{fault.at_s:.3f}", fault.target, fault.text] for fault in record.faults[:1000]]
        body.append("<h2>Faults</h2>" + table(["second", "where", "what"], rows))
    body.append(folded("Settings", as_json(record.settings).decode()))
    body.append(folded("Counters", as_json(summary.counters).decode()))
    return page(title or record.title or "Simulation", "".join(body))


def totals(summaries: Sequence[Summary]) -> list[list[str]]:
    """Rows of figures that are one number per run."""
    rows = [
        ["requests", *(f"{s.num_requests:,}" for s in summaries)],
        ["finished", *(f"{s.num_finished:,}" for s in summaries)],
    ]
    endings = sorted({ending for s in summaries for ending in s.endings if "finished" not in ending})
    rows += [[f"  {ending}", *(f"{s.endings.get(ending, 0):,}" for s in summaries)] for ending in endings]
    rows += [
        ["requests per second", *(f"{s.requests_per_s:.4g}" for s in summaries)],
        ["prompt tokens per second", *(f"{s.input_tokens_per_s:,.0f}" for s in summaries)],
        ["output tokens per second", *(f"{s.output_tokens_per_s:,.0f}" for s in summaries)],
    ]
    for s in summaries[:1]:
        if s.goodput is not None:
            wanted = f"TTFT {s.goodput.target.ttft_s:g} s, TPOT {s.goodput.target.tpot_s:g} s"
            shares = [x.goodput.share if x.goodput is not None else 0.0 for x in summaries]
            rows.append([f"within {wanted}", *(f"{share:.1%}" for share in shares)])
    rows += [
        ["prefix cache hit rate", *("-" if s.hit_rate is None else f"{s.hit_rate:.1%}" for s in summaries)],
        ["steps", *(f"{s.num_steps:,}" for s in summaries)],
        ["preemptions", *(f"{s.num_preemptions:,}" for s in summaries)],
        ["virtual seconds", *(f"{s.virtual_s:,.1f}" for s in summaries)],
        ["wall seconds", *(f"{s.wall_s:,.1f}" for s in summaries)],
    ]
    return rows


def times_table(summaries: Sequence[Summary]) -> str:
    """Distributions side by side, of several runs under the letters A, B, ..."""
    letters = ascii_uppercase[: len(summaries)] if len(summaries) > 1 else [""]
    header = ["ms", *(f"{name} {letter}".strip() for name in FIGURES for letter in letters)]
    return table(header, time_rows(summaries))


def time_rows(summaries: Sequence[Summary]) -> list[list[str]]:
    """One row per kind of time that any run has: name, then figure by figure the runs, in ms."""
    rows = []
    for field, name in TIMES.items():
        found: list[Distribution | None] = [getattr(summary, field) for summary in summaries]
        if not any(found):
            continue
        cells = [
            "-" if times is None else f"{1000 * getattr(times, figure):,.2f}"
            for figure in FIGURES
            for times in found
        ]
        rows.append([name, *cells])
    return rows


def check_place(directory: Path) -> None:
    """Ask before a run whether its report can be written, not after it. Raises ConfigError."""
    probe = directory / ".ksana-report"
    write_file(probe, b"")
    probe.unlink(missing_ok=True)


def write_file(path: Path, content: bytes) -> None:
    """Whole or not at all. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None
