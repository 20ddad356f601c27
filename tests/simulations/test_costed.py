"""Runs with a measured cost model: its times, its host time, and its bounds."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from ksana.costs.cost_file import CostModel, save_cost
from ksana.costs.fitted_cost import QUANTITIES, FittedTerms
from ksana.errors import ConfigError
from simulations.costed import CostChoice, add_cost_arguments, read_cost, run_costed
from simulations.engine import EngineSpec
from simulations.reports.metrics import RunRecord
from simulations.reports.summary import summarise
from simulations.scenario import WorldSpec
from simulations.workloads.made_up import Texts
from simulations.workloads.spec import OpenSpec, open_workload

WORLD = WorldSpec(engines=(EngineSpec(plan_ahead=False),))
WORK = OpenSpec(texts=Texts(input_tokens="20", output_tokens="5"), num_requests=10, rate_per_s=0.1, cv=0.0)


def run(choice: CostChoice | None) -> RunRecord:
    return run_costed(WORLD, open_workload(WORK, 1), choice, seed=1)


def saved(tmp_path: Path, most: int, host_s: float = 0.0) -> str:
    data = FittedTerms(constant_s=0.5, terms=(), most={**dict.fromkeys(QUANTITIES, 10**9), "tokens": most})
    save_cost(tmp_path / "cost.json", CostModel(data, host_s=host_s, source="a test"))
    return str(tmp_path / "cost.json")


def test_steps_take_what_the_model_says(tmp_path: Path) -> None:
    record = run(CostChoice(path=saved(tmp_path, most=1000)))
    summary = summarise(record)
    assert summary.ttft_s is not None
    assert summary.tpot_s is not None
    assert summary.ttft_s.mean == pytest.approx(0.5)
    assert summary.tpot_s.mean == pytest.approx(0.5)
    assert summary.counters["num_extrapolated"] == 0
    assert record.settings["cost"]["source"] == "a test"


def test_the_host_takes_its_time_between_steps(tmp_path: Path) -> None:
    summary = summarise(run(CostChoice(path=saved(tmp_path, most=1000, host_s=0.1))))
    assert summary.tpot_s is not None
    assert summary.tpot_s.mean == pytest.approx(0.6)


def test_steps_beyond_what_was_measured_end_the_run_or_are_counted(tmp_path: Path) -> None:
    path = saved(tmp_path, most=10)
    with pytest.raises(ConfigError, match=r"cost\.json: a step with tokens 20"):
        run(CostChoice(path=path))
    for _ in range(2):  # the second run counts its own
        record = run(CostChoice(path=path, allow_extrapolation=True))
        assert summarise(record).counters["num_extrapolated"] == 10


def test_without_a_model_the_world_has_its_own() -> None:
    assert "num_extrapolated" not in summarise(run(None)).counters


def test_arguments(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_cost_arguments(parser)
    path = saved(tmp_path, most=10)
    assert read_cost(parser.parse_args([])) is None
    chosen = read_cost(parser.parse_args(["--cost", path, "--allow-extrapolation"]))
    assert chosen == CostChoice(path=path, allow_extrapolation=True)
    with pytest.raises(ConfigError, match="without --cost"):
        read_cost(parser.parse_args(["--allow-extrapolation"]))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_cost(parser.parse_args(["--cost", str(tmp_path / "missing")]))
