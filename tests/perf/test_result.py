"""The result file: statistics, and that it appears whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana.errors import ConfigError
from ksana.perf.report import operator_shares, result_page, summary_table
from ksana.perf.result import (
    BatchResult,
    BatchShape,
    OperatorSample,
    PerfResult,
    RequestGroup,
    RoundSample,
    read_result,
    statistics_of,
    summarize,
    write_result,
)


def sample(step_ns: int) -> RoundSample:
    return RoundSample(
        schedule_ns=1,
        dispatch_ns=2,
        prepare_ns=3,
        forward_ns=step_ns - 11,
        sampling_ns=4,
        update_ns=1,
        step_ns=step_ns,
    )


def batch(name: str = "b", error: str | None = None, *, computed: int = 1) -> BatchResult:
    rounds = () if error else tuple(sample(step_ns) for step_ns in (1000, 3000, 2000))
    return BatchResult(
        name=name,
        shape=BatchShape(
            requests=(RequestGroup(sequence_len=10, forwarding_token_num=computed, request_num=2),),
            num_requests=2,
            num_prefills=2 if computed > 1 else 0,
            num_decodes=0 if computed > 1 else 2,
            num_forwarding_tokens=2 * computed,
            num_kv_tokens=20 - 2 * computed,
        ),
        warmup_rounds=1,
        stat_rounds=3,
        rounds=rounds,
        operator_rounds=(
            {"rope": OperatorSample(total_ns=30, calls=3), "<x>": OperatorSample(total_ns=10, calls=1)},
        ),
        summary=summarize(rounds),
        error=error,
    )


def result(*batches: BatchResult) -> PerfResult:
    return PerfResult(
        model="tiny <&> model",
        model_fingerprint="f",
        device="CPU",
        dtype="float32",
        parallel_sizes={"tensor": 1},
        block_size=16,
        versions={"ksana": "0"},
        plan_ahead=False,
        seed=42,
        max_num_batched_tokens=512,
        max_num_seqs=64,
        max_model_len=8192,
        batches=batches,
    )


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=50))
def test_statistics_are_those_of_numpy(values: list[int]) -> None:
    got = statistics_of(values)
    assert (got.min, got.max) == (min(values), max(values))
    expected = [np.mean(values), *np.percentile(values, [50, 90, 99]), np.std(values)]
    assert [got.mean, got.p50, got.p90, got.p99, got.std] == pytest.approx(expected, rel=1e-9, abs=1e-3)


def test_a_summary_has_every_field() -> None:
    summary = summarize([sample(1000), sample(3000)])
    assert set(summary) == set(RoundSample.__struct_fields__)
    assert summary["step_ns"].mean == 2000
    assert summary["step_ns"].std == 1000
    assert summarize([]) == {}


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    written = result(batch(), batch("bad", "it failed"))
    write_result(file, written)
    assert read_result(file) == written
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == ["r.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "r.json"
    write_result(file, result())
    before = file.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        write_result(file, result(batch()))
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["r.json"]


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    for content in (b"", b"[]", b"\xff", b'{"schema_version": 1}', b"[" * 100_000):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="is not a result of `ksana perf`"):
            read_result(file)
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(result(), schema_version=9)))
    with pytest.raises(ConfigError, match="schema version 9; this program reads 1"):
        read_result(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_result(tmp_path / "missing.json")


def test_impossible_shapes_and_times_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    raw = msgspec.json.encode(result(batch()))
    for old, new, said in (
        (b'"request_num":2', b'"request_num":1000000000', "Expected `int` <= 4096"),
        (b'"request_num":2', b'"request_num":3', "its shape contradicts itself"),
        (b'"forwarding_token_num":1', b'"forwarding_token_num":11', "its shape contradicts itself"),
        (b'"update_ns":', b'"update_ns":-', "Expected `int` >= 0"),
    ):
        assert old in raw
        file.write_bytes(raw.replace(old, new))
        with pytest.raises(ConfigError, match=said):
            read_result(file)


def test_the_table_has_a_line_for_each_batch() -> None:
    lines = summary_table(result(batch("one"), batch("two", "oh"))).splitlines()
    assert lines[0].split()[:3] == ["batch", "requests", "tokens"]
    assert lines[1].split() == ["one", "2", "2", "18", "0.002", "0.002", "0.003"]
    assert lines[2].split() == ["two", "2", "2", "18", "failed"]


def test_operators_by_share() -> None:
    assert operator_shares([batch(), batch()]) == [("rope", 0.75, 6), ("<x>", 0.25, 2)]
    assert operator_shares([]) == []


def test_the_page_is_whole_and_escapes_what_it_shows() -> None:
    html = result_page(result(batch("<script>"), batch("p", computed=5), batch("bad", "it <b>failed</b>")))
    assert html.startswith("<!doctype html>")
    assert html.rstrip().endswith("</html>")
    for text in ("tiny &lt;&amp;&gt; model", "&lt;script&gt;", "it &lt;b&gt;failed&lt;/b&gt;", "75.0%"):
        assert text in html
    assert "<script" not in html
    assert "<b>" not in html
    assert "http" not in html.replace("http://www.w3.org", "")
    assert html.count("<figure>") == 4


def test_a_page_of_nothing() -> None:
    assert "no data" in result_page(result(batch("bad", "it failed")))
