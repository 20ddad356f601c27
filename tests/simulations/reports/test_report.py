"""Reports: what is written, that it is whole, and that it is safe to open."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from ksana.errors import ConfigError
from simulations.reports.report import Result, write_file, write_report
from simulations.reports.summary import Target, summarise
from simulations.reports.timelines import timelines
from tests.simulations.records import made_up_run

CHARTS = [
    "Time to first token (cumulative)",
    "Time per output token (cumulative)",
    "Gap between two tokens (cumulative)",
    "Latency to the last token (cumulative)",
    "Time to first token, by arrival",
    "Running and waiting requests",
    "KV cache in use",
    "Prefix cache hit rate",
    "Tokens per step",
]


def test_a_report_has_its_three_files(tmp_path: Path) -> None:
    record = made_up_run()
    target = Target(ttft_s=0.5, tpot_s=0.2)
    summary = write_report(tmp_path / "deep" / "out", record, "A <title>", target)
    written = sorted(path.name for path in (tmp_path / "deep" / "out").iterdir())
    assert written == ["report.html", "result.json", "trace.json"]
    result = msgspec.json.decode((tmp_path / "deep/out/result.json").read_bytes(), type=Result)
    assert result == Result(summary=summary, settings=record.settings)
    assert summary == summarise(record, target)


def test_the_page_shows_everything_and_fetches_nothing(tmp_path: Path) -> None:
    write_report(tmp_path, made_up_run(), "A <title>")
    text = (tmp_path / "report.html").read_text()
    assert re.findall('<text class="title"[^>]*>([^<]*)<', text) == CHARTS
    assert "A &lt;title&gt;" in text
    assert "<title>engine 0: &lt;crash&gt;</title>" in text
    assert '<th scope="row">time to first token</th><td>200.00</td>' in text
    assert '<th scope="row">  failed 504</th><td>1</td>' in text
    for outside in ("http:", "https:", "<script", "<link", "<img", "@import", "url("):
        assert outside not in text


def test_a_run_without_anything_is_reported_too(tmp_path: Path) -> None:
    record = made_up_run(num_requests=1)
    record.requests.clear()
    record.engines.clear()
    write_report(tmp_path, record)
    assert "<svg" in (tmp_path / "report.html").read_text()  # the queues, which were empty


def test_engines_are_added_up_and_windows_have_their_own_hit_rate() -> None:
    charts = {chart.title: chart for chart in timelines([made_up_run()]) if chart is not None}
    running, waiting = charts["Running and waiting requests"].series
    assert list(running.points[:4]) == [(0.0, 0.0), (1.0, 2.0), (2.0, 4.0), (3.0, 0.0)]
    assert list(waiting.points[:3]) == [(0.0, 0.0), (1.0, 2.0), (2.0, 0.0)]
    at_that_time, since_the_start = charts["Prefix cache hit rate"].series
    for _, share in (*at_that_time.points, *since_the_start.points):
        assert share == pytest.approx(40.0)
    assert [line.name for line in charts["KV cache in use"].series] == ["engine 0", "engine 1"]
    assert [mark.text for mark in charts["Tokens per step"].marks] == ["engine 0: <crash>", "store: down"]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        write_file(tmp_path / "taken", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    (tmp_path / "file").write_text("old")
    with pytest.raises(ConfigError, match="cannot write"):
        write_file(tmp_path / "file" / "below", b"content")
    write_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
