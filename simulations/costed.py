"""Runs of worlds whose steps take what a measured cost model says."""

from __future__ import annotations

import argparse
import sys
from functools import lru_cache
from pathlib import Path

import msgspec

from ksana.costs.cost_file import CostModel, load_cost
from ksana.costs.extrapolation import ExtrapolationError
from ksana.errors import ConfigError
from simulations.keep import Keep
from simulations.reports.metrics import RunRecord
from simulations.requests import Workload
from simulations.scenario import WorldSpec
from simulations.world import run_world


class CostChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A cost model's file, as `ksana perf --cost-file` writes it."""

    path: str
    allow_extrapolation: bool = False
    """False: a step outside of what was measured ends the run. True: it is counted."""


def run_costed(
    world: WorldSpec,
    workload: Workload,
    choice: CostChoice | None,
    *,
    seed: int = 0,
    keep: Keep | None = None,
    title: str = "",
) -> RunRecord:
    """Run the world with the model's step times, or with its own where none is chosen.

    The record says which model it was, and counts `num_extrapolated` steps. Raises ConfigError: no such
    model, or a step outside of what it was made from.
    """
    if choice is None:
        return run_world(world, workload, seed=seed, keep=keep, title=title)
    model = _load(choice)
    num_before = model.num_extrapolated
    try:
        record = run_world(
            world, workload, seed=seed, cost=model.step, host_s=model.host_s, keep=keep, title=title
        )
    except ExtrapolationError as error:
        raise ConfigError(f"{choice.path}: {error}") from None
    record.settings["cost"] = {
        "path": choice.path,
        "source": model.source,
        "host_s": model.host_s,
        "errors": msgspec.to_builtins(model.errors),
    }
    record.counters["num_extrapolated"] = model.num_extrapolated - num_before
    return record


@lru_cache(maxsize=4)
def _load(choice: CostChoice) -> CostModel:
    """Once per process: a search runs many worlds with one model."""
    return load_cost(Path(choice.path), choice.allow_extrapolation)


def add_cost_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that `read_cost` reads."""
    parser.add_argument("--cost", metavar="FILE", help="a cost model, as `ksana perf` fits it")
    parser.add_argument(
        "--allow-extrapolation", action="store_true", help="count steps beyond what was measured, do not stop"
    )


def read_cost(options: argparse.Namespace) -> CostChoice | None:
    """Raises ConfigError for a file that is no cost model."""
    if options.cost is None:
        if options.allow_extrapolation:
            raise ConfigError("--allow-extrapolation means nothing without --cost")
        sys.stderr.write("no --cost: the device is made up, and so are all times\n")
        return None
    choice = CostChoice(path=options.cost, allow_extrapolation=options.allow_extrapolation)
    _load(choice)
    return choice
