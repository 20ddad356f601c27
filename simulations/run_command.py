"""`python -m simulations run`: one world, from a scenario and what the command line changes of it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from ksana.errors import ConfigError, InvariantViolated
from simulations.arguments import add_workload_arguments, with_workload
from simulations.checks.promises import NotOver
from simulations.costed import CostChoice, add_cost_arguments, read_cost, run_costed
from simulations.keep import Keep
from simulations.reports.metrics import RunRecord
from simulations.reports.report import check_place, write_report
from simulations.reports.summary import Target, as_json, summarise
from simulations.scenario import Scenario
from simulations.scenarios import SCENARIOS, find_scenario
from simulations.settings import parse_settings, with_settings


def add_run_command(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "run", help="one world: what its clients saw, as JSON and as a page with charts"
    )
    parser.add_argument("scenario", help=f"{', '.join(SCENARIOS)}, or a JSON file")
    parser.add_argument("--seed", type=int, help="default: the scenario's")
    add_workload_arguments(parser)
    add_cost_arguments(parser)
    parser.add_argument("--report", type=Path, metavar="DIR", help="result.json, report.html and trace.json")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of the world or of its engines"
    )
    parser.add_argument("--check", action="store_true", help="the cache's invariants after every message")
    parser.add_argument("--digest", action="store_true", help="SHA-256 of every message, in order")
    parser.add_argument("--ttft-ms", type=float, help="with --tpot-ms: the share of requests within both")
    parser.add_argument("--tpot-ms", type=float)
    parser.add_argument("--show", action="store_true", help="print the scenario, do not run it")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the summary. Returns the exit code; raises ConfigError."""
    scenario = read(options)
    target = _target(options)
    if options.show:
        _print(msgspec.json.encode(scenario))
        return 0
    if options.report is not None:
        check_place(options.report)
    cost = read_cost(options)
    try:
        record = run_scenario(
            scenario,
            cost=cost,
            check=options.check,
            digest=options.digest,
            detail=options.report is not None,
        )
    except NotOver as error:
        sys.stderr.write(f"stopped by until_s: {error}. Without figures: give it more, or fewer requests\n")
        return 1
    except InvariantViolated as error:
        sys.stderr.write(f"a promise is broken: {error}\n")
        return 1
    _print(as_json(summarise(record, target)))
    if options.report is not None:
        write_report(options.report, record, scenario.title or None, target)
    return 0


def read(options: argparse.Namespace) -> Scenario:
    """The scenario with what the command line changes. Raises ConfigError."""
    scenario = find_scenario(options.scenario)
    world = with_settings(scenario.world, parse_settings(options.set))
    changed = msgspec.structs.replace(scenario, world=world)
    if options.seed is not None:
        changed = msgspec.structs.replace(changed, seed=options.seed)
    changed = with_workload(changed, options)
    if changed.workload is None and not changed.requests:
        raise ConfigError(f"{options.scenario} asks nothing: give it requests, a workload or --trace")
    changed.check()
    return changed


def run_scenario(
    scenario: Scenario,
    *,
    cost: CostChoice | None = None,
    check: bool = False,
    digest: bool = False,
    detail: bool = False,
) -> RunRecord:
    """`detail`: steps and token times, which the report shows. Raises InvariantViolated, or ConfigError."""
    return run_costed(
        scenario.world,
        scenario.open_workload(scenario.seed),
        cost,
        seed=scenario.seed,
        keep=Keep(digest=digest, steps=detail, token_times=detail, check_cache=check),
        title=scenario.title,
    )


def _target(options: argparse.Namespace) -> Target | None:
    if options.ttft_ms is None and options.tpot_ms is None:
        return None
    if options.ttft_ms is None or options.tpot_ms is None:
        raise ConfigError("--ttft-ms and --tpot-ms belong together")
    return Target(ttft_s=options.ttft_ms / 1000, tpot_s=options.tpot_ms / 1000)


def _print(text: bytes) -> None:
    sys.stdout.write(msgspec.json.format(text, indent=2).decode() + "\n")
