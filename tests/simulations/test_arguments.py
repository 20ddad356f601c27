"""Worlds and workloads on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import pytest

from ksana.errors import ConfigError
from simulations.arguments import add_scenario_arguments, read_scenario
from simulations.scenario import Scenario, WorldSpec
from simulations.scenarios import SCENARIOS
from simulations.workloads.made_up import Texts
from simulations.workloads.spec import ClosedSpec, OpenSpec, SessionsSpec, TraceSpec, WorkloadSpec


def read(*arguments: str) -> Scenario:
    parser = argparse.ArgumentParser()
    add_scenario_arguments(parser)
    return read_scenario(parser.parse_args(arguments))


def asked(*arguments: str) -> WorkloadSpec | None:
    return read(*arguments).workload


def test_a_scenario_keeps_its_workload_unless_another_is_asked_for(tmp_path: Path) -> None:
    chat = SCENARIOS["chat"]
    kept = read("--scenario", "chat", "--seed", "7", "--set", "replicas=3")
    assert (kept.workload, kept.seed, kept.world.replicas) == (chat.workload, 7, 3)
    assert isinstance(chat.workload, OpenSpec)
    changed = asked("--scenario", "chat", "--rate", "3", "--prefixes", "2")
    texts = msgspec.structs.replace(chat.workload.texts, num_prefixes=2)
    assert changed == msgspec.structs.replace(chat.workload, rate_per_s=3.0, texts=texts)
    assert asked("--scenario", "chat", "--users", "3") == ClosedSpec(num_users=3)
    path = tmp_path / "scenario.json"
    path.write_bytes(msgspec.json.encode(Scenario(world=WorldSpec(replicas=2))))
    assert (read("--scenario", str(path)).world.replicas, asked()) == (2, OpenSpec())
    with pytest.raises(ConfigError, match="no scenario"):
        read("--scenario", "nonsense")


def test_workloads() -> None:
    texts = Texts(input_tokens="7", output_tokens="uniform:1:3", num_prefixes=2, prefix_tokens="64")
    flags = ["--input-tokens", "7", "--output-tokens", "uniform:1:3"]
    flags += ["--prefixes", "2", "--prefix-tokens", "64"]
    spec = asked(*flags, "--requests", "5", "--rate", "2.5", "--cv", "3")
    assert spec == OpenSpec(texts=texts, num_requests=5, rate_per_s=2.5, cv=3.0)
    spec = asked(*flags, "--requests", "5", "--users", "4", "--think", "2")
    assert spec == ClosedSpec(texts=texts, num_requests=5, num_users=4, think_s=2.0)
    spec = asked(*flags, "--sessions", "3", "--turns", "2", "--rate", "0.5")
    assert spec == SessionsSpec(texts=texts, num_sessions=3, turns="2", rate_per_s=0.5)
    spec = asked("--trace", "t", "--limit", "9", "--speedup", "2")
    assert spec == TraceSpec(path="t", limit=9, speedup=2.0)
    with pytest.raises(ConfigError, match="rate_per_s"):
        read("--rate", "nan")


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("--users 3 --rate 2", "--rate means nothing for this workload .users"),
        ("--users 3 --sessions 2", "--users means nothing for this workload .sessions"),
        ("--trace t --input-tokens 5", "--input-tokens means nothing for this workload .trace"),
        ("--limit 5", "--limit means nothing for this workload .open"),
        ("--think 5", "--think means nothing for this workload .open"),
        ("--scenario conversations --cv 5", "--cv means nothing for this workload .sessions"),
    ],
)
def test_what_would_be_ignored_is_refused(line: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read(*line.split())
