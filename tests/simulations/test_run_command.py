"""`python -m simulations run`, and the scenarios it takes."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from ksana.errors import ConfigError
from simulations.__main__ import main
from simulations.scenario import Scenario, read_scenario
from simulations.scenarios import SCENARIOS, find_scenario
from simulations.swarm.swarm_draw import draw_scenario


def told(capsys: pytest.CaptureFixture) -> dict:
    return json.loads(capsys.readouterr().out)


def test_a_scenario_by_name_with_settings_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}
    trace.write_text("".join(json.dumps(line | {"timestamp": 100 * n}) + "\n" for n in range(20)))
    arguments = ["run", "chat", "--trace", str(trace), "--seed", "4", "--set", "replicas=2", "--digest"]
    assert main([*arguments, "--report", str(tmp_path / "out")]) == 0
    summary = told(capsys)
    assert summary["num_finished"] == 20
    assert summary["seed"] == 4
    assert len(summary["digest"]) == 64
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "result.json",
        "report.html",
        "trace.json",
    }
    assert main(arguments) == 0
    assert told(capsys)["digest"] == summary["digest"], "a report changes nothing"


def test_a_scenario_is_shown_as_a_file_that_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["run", "bad-day", "--show", "--set", "max_num_seqs=5"]) == 0
    file = tmp_path / "shown.json"
    file.write_text(capsys.readouterr().out)
    shown = read_scenario(file)
    assert shown.world.engines[0].max_num_seqs == 5
    assert shown.world.faults == SCENARIOS["bad-day"].world.faults


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "shared-store"])
def test_named_scenarios_run(name: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["run", name]) == 0
    summary = told(capsys)
    assert summary["num_finished"] > 0.9 * summary["num_requests"]


@pytest.mark.slow
def test_the_scenario_with_a_store_runs_and_hits(capsys: pytest.CaptureFixture) -> None:
    assert main(["run", "shared-store", "--check"]) == 0
    assert told(capsys)["counters"]["num_remote_hit_tokens"] > 0


def test_a_promise_that_is_broken_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "one.json"
    file.write_bytes(msgspec.json.encode(draw_scenario(0)))
    monkeypatch.setattr(
        "simulations.script.Script.token", lambda self, position: 7 + id(self) % 2 + position % 2
    )
    monkeypatch.setattr("simulations.frontend.Script.tokens", lambda *_: (0,))
    assert main(["run", str(file)]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("a promise is broken: ")


def spoiled(**changes: object) -> dict:
    return json.loads(msgspec.json.encode(draw_scenario(0))) | changes


def spoiled_request(**changes: object) -> dict:
    scenario = json.loads(msgspec.json.encode(draw_scenario(0)))
    scenario["requests"][0] |= changes
    return scenario


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        json.dumps({"unknown": 1}),
        json.dumps(spoiled(world={"engines": []})),
        json.dumps(spoiled(world={"engines": [{"block_size": -1}]})),
        json.dumps(spoiled(world={"replicas": 1_000_000_000})),
        json.dumps(spoiled(world={"faults": [{"kind": "meteor"}]})),
        json.dumps(spoiled(workload={"type": "open"})),
        json.dumps(spoiled_request(arrival_s=-1)),
        json.dumps(spoiled_request(max_tokens=0)),
        json.dumps(spoiled_request(timeout_s=0)),
        json.dumps(spoiled_request(prompt={"parts": [["named", 5, 1 << 40]]})),
        json.dumps(spoiled_request(prompt={"parts": [["named", -5, 3]]})),
        json.dumps(spoiled_request(prompt={"parts": [["listed", [1 << 40]]]})),
        json.dumps({"requests": []}),
    ],
)
def test_hostile_files_are_refused_in_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "hostile.json"
    file.write_text(text)
    assert main(["run", str(file)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("python -m simulations run: ")
    assert err.count("\n") == 1


def test_files_that_are_not_there_and_names_nobody_gave(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json cannot be read"):
        find_scenario(str(tmp_path / "nowhere.json"))
    with pytest.raises(ConfigError, match="there is no scenario 'nothing'"):
        find_scenario("nothing")


def test_every_named_scenario_can_be_written_down() -> None:
    for scenario in SCENARIOS.values():
        scenario.check()
        assert msgspec.json.decode(msgspec.json.encode(scenario), type=Scenario) == scenario


def test_a_place_that_cannot_be_written_is_found_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("simulations.run_command.run_scenario", lambda *_a, **_k: pytest.fail("it ran"))
    assert main(["run", "chat", "--report", str(tmp_path / "file" / "out")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_run_that_is_cut_short_breaks_no_promise(capsys: pytest.CaptureFixture) -> None:
    assert main(["run", "chat", "--set", "until_s=0.5"]) == 1
    err = capsys.readouterr().err
    assert "stopped by until_s: " in err
    assert "promise" not in err
    assert "the device is made up" in err


def test_ctrl_c_is_one_line(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_args: object, **_kwargs: object) -> None:
        raise BaseExceptionGroup("tasks", [KeyboardInterrupt()])

    monkeypatch.setattr("simulations.run_command.run_scenario", stopped)
    assert main(["run", "chat"]) == 130
    assert capsys.readouterr().err.splitlines()[-1].endswith("stopped by Ctrl-C, nothing is reported")


def test_workloads_as_the_documents_have_them(capsys: pytest.CaptureFixture) -> None:
    for arguments in (
        ["--rate", "5", "--requests", "10"],
        ["--users", "3", "--requests", "10", "--think", "2"],
        ["--sessions", "3", "--rate", "1", "--turns", "uniform:1:3", "--think", "1"],
    ):
        assert main(["run", "chat", *arguments]) == 0
        assert told(capsys)["num_finished"] >= 3
    assert main(["run", "chat", "--users", "3", "--rate", "5"]) == 2
    assert "--rate means nothing for this workload (users)" in capsys.readouterr().err
