"""The speed benchmark runs, on little."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.simulation_speed import Decodes, print_mooncake


def test_decodes_are_counted_and_timed() -> None:
    decodes = Decodes(4, 50, window=64, timed=True)
    assert min(decodes.run()) > 0
    assert all(seconds > 0 for seconds in decodes.seconds.values())


def test_a_trace_is_replayed_on_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 3000 * (number // 4),
            "input_length": 1024 + number,
            "output_length": 20,
            "hash_ids": [0, 1, number + 2],
        }
        for number in range(1, 25)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print_mooncake(trace, replicas=2, limit=20)
    printed = capsys.readouterr().out
    assert "trace.jsonl on 2 replicas" in printed
    assert "20 of 20 requests finished, 20,690 prompt tokens, 400 output tokens" in printed
    assert "hit rate 0." in printed
    assert "hit rate 0.000" not in printed
