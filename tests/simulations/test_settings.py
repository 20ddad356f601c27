"""Settings on the command line reach the world, its engines and its workload, or are refused by name."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import pytest

from ksana.errors import ConfigError
from simulations.scenario import Scenario, WorldSpec
from simulations.settings import (
    add_workload_arguments,
    add_world_arguments,
    parse_settings,
    read_workload,
    read_world,
    with_settings,
)
from simulations.workloads.made_up import Texts
from simulations.workloads.spec import ClosedSpec, OpenSpec, SessionsSpec, TraceSpec


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_world_arguments(parser)
    add_workload_arguments(parser)
    return parser.parse_args(arguments)


def test_settings_reach_the_world_and_every_engine(tmp_path: Path) -> None:
    path = tmp_path / "scenario.json"
    base = with_settings(WorldSpec(), {"replicas": 3, "block_size": 4})
    path.write_bytes(msgspec.json.encode(Scenario(world=base)))
    world = read_world(
        options("--scenario", str(path), "--set", "max-num-seqs=9", "--set", "routing=least_requests")
    )
    assert (world.replicas, world.routing) == (3, "least_requests")
    assert {(engine.block_size, engine.max_num_seqs) for engine in world.all_engines} == {(4, 9)}


@pytest.mark.parametrize(
    ("texts", "match"),
    [
        (["max_num_seqs"], "key=value"),
        (["=3"], "key=value"),
        (["nonsense=3"], "no setting 'nonsense'"),
        (["max_num_seqs=many"], "settings: Expected `int`"),
        (["max_num_seqs=0"], "max_num_seqs must be positive"),
        (["replicas=100000"], "1 to 256 engines"),
        (["routing=" + "[" * 100_000], "settings"),
    ],
)
def test_wrong_settings(texts: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        with_settings(WorldSpec(), parse_settings(texts))


def test_workloads() -> None:
    texts = Texts(input_tokens="7", output_tokens="uniform:1:3", num_prefixes=2, prefix_tokens="64")
    flags = (
        "--input-tokens",
        "7",
        "--output-tokens",
        "uniform:1:3",
        "--prefixes",
        "2",
        "--prefix-tokens",
        "64",
    )
    spec = read_workload(options(*flags, "--requests", "5", "--rate", "2.5", "--cv", "3"))
    assert spec == OpenSpec(texts=texts, num_requests=5, rate_per_s=2.5, cv=3.0)
    spec = read_workload(options(*flags, "--requests", "5", "--users", "4", "--think", "2"))
    assert spec == ClosedSpec(texts=texts, num_requests=5, num_users=4, think_s=2.0)
    spec = read_workload(options(*flags, "--sessions", "3", "--turns", "2", "--rate", "0.5"))
    assert spec == SessionsSpec(texts=texts, num_sessions=3, turns="2", rate_per_s=0.5, think_s=0.0)
    spec = read_workload(options("--trace", "t", "--limit", "9", "--speedup", "2"))
    assert spec == TraceSpec(path="t", limit=9, speedup=2.0)
    with pytest.raises(ConfigError, match="rate_per_s"):
        read_workload(options("--rate", "nan"))
