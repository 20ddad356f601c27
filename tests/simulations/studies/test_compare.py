"""Two settings side by side: only what was set differs, and its effect is shown."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec
import pytest

from ksana.errors import ConfigError
from simulations.scenario import Scenario, WorldSpec
from simulations.studies.compare import add_compare_command, differences, read_side

WORK = ("--requests", "40", "--rate", "20", "--input-tokens", "40", "--output-tokens", "5")


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_compare_command(parser.add_subparsers(required=True))
    options = parser.parse_args(["compare", *arguments])
    code: int = options.run(options)
    return code


def test_fewer_seats_make_a_queue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("max_num_seqs=1", "max_num_seqs=32", *WORK, "--seed", "3", "--report", str(tmp_path)) == 0
    lines = {line[:34].strip(): line[34:].split() for line in capsys.readouterr().out.splitlines()}
    assert lines["requests"] == ["40", "40"]
    before, after, change = lines["time to first token, mean (ms)"]
    assert float(after.replace(",", "")) < float(before.replace(",", "")) / 2
    assert change.startswith("-")
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["differences"] == {"engines[0].max_num_seqs": [1, 32]}
    assert f"{1000 * written['a']['ttft_s']['mean']:,.2f}" == before
    text = (tmp_path / "report.html").read_text()
    assert text.count("A: max_num_seqs=1") > 5
    assert "Waiting requests" in text


def test_the_same_settings_give_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("block_size=16", "", *WORK) == 0
    changes = [line.split()[-1] for line in capsys.readouterr().out.splitlines() if "(ms)" in line]
    assert len(changes) > 10
    assert set(changes) <= {"+0.0%", "0.00"}


def test_sides_are_settings_or_files(tmp_path: Path) -> None:
    base = WorldSpec(replicas=2)
    settings = tmp_path / "settings.json"
    settings.write_text('{"max_num_seqs": 3}')
    scenario = tmp_path / "scenario.json"
    scenario.write_bytes(msgspec.json.encode(Scenario(world=WorldSpec(replicas=5))))
    text = read_side("max-num-seqs=3 routing=least_requests", base)
    assert (text.engines[0].max_num_seqs, text.routing, text.replicas) == (3, "least_requests", 2)
    assert read_side(str(settings), base).engines[0].max_num_seqs == 3
    assert read_side(str(scenario), base).replicas == 5
    assert differences(base, read_side(str(settings), base)) == {"engines[0].max_num_seqs": (64, 3)}


@pytest.mark.parametrize(
    "content", ["[1]", "{", "[" * 100_000, '{"nonsense": 1}', '{"world": {"replicas": 0}}']
)
def test_hostile_files(tmp_path: Path, content: str) -> None:
    path = tmp_path / "side.json"
    path.write_text(content)
    with pytest.raises(ConfigError):
        read_side(str(path), WorldSpec())


@pytest.mark.parametrize("text", ["missing.json", "'", "max_num_seqs", "max_num_seqs=x"])
def test_wrong_sides(text: str) -> None:
    with pytest.raises(ConfigError):
        read_side(text, WorldSpec())
