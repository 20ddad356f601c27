"""Two settings, one workload, one seed: what changes?"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ksana.errors import ConfigError
from ksana.input_file import read_input
from ksana.perf.html_page import charts, page, table
from simulations import arguments
from simulations.costed import CostChoice, add_cost_arguments, read_cost, run_costed
from simulations.keep import Keep
from simulations.reports.figures import run_figures
from simulations.reports.metrics import RunRecord
from simulations.reports.report import TIMES, check_place, times_table, totals, write_file
from simulations.reports.summary import Distribution, Summary, as_json, summarise
from simulations.scenario import Scenario, WorldSpec, read_scenario
from simulations.settings import parse_settings, with_settings

_MAX_FILE_BYTES = 1 << 20
_FIGURES = ("mean", "p50", "p99")


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What is in `result.json`."""

    differences: dict[str, tuple[Any, Any]]
    """Settings in which the two worlds differ."""
    a: Summary
    b: Summary


def compare(
    scenario: Scenario, worlds: Sequence[WorldSpec], titles: Sequence[str], cost: CostChoice | None = None
) -> list[RunRecord]:
    """The scenario's workload and seed in each world. Raises ConfigError for a wrong trace."""
    keep = Keep(check_answers=False, steps=True, token_times=True)
    seed = scenario.seed
    return [
        run_costed(world, scenario.open_workload(seed), cost, seed=seed, keep=keep, title=title)
        for world, title in zip(worlds, titles, strict=True)
    ]


def differences(a: WorldSpec, b: WorldSpec) -> dict[str, tuple[Any, Any]]:
    """Fields that differ, engines' fields by `engines[0].name`."""

    def flat(value: Any, name: str) -> dict[str, Any]:
        if isinstance(value, dict):
            named = [(f"{name}.{key}" if name else key, part) for key, part in value.items()]
        elif isinstance(value, list | tuple):
            named = [(f"{name}[{index}]", part) for index, part in enumerate(value)]
        else:
            return {name: value}
        return {key: leaf for child, part in named for key, leaf in flat(part, child).items()}

    left, right = flat(msgspec.to_builtins(a), ""), flat(msgspec.to_builtins(b), "")
    names = sorted({*left, *right})
    return {name: (left.get(name), right.get(name)) for name in names if left.get(name) != right.get(name)}


def rows(summaries: Sequence[Summary]) -> list[list[str]]:
    """For a terminal: what, A, B, and the change from A to B where it is a number."""
    table_rows = [[*row, ""] for row in totals(summaries)]
    for field, name in TIMES.items():
        found: list[Distribution | None] = [getattr(summary, field) for summary in summaries]
        for figure in _FIGURES:
            values = [None if times is None else 1000 * getattr(times, figure) for times in found]
            if None in values:
                continue
            before, after = (value for value in values if value is not None)
            change = f"{after / before - 1:+.1%}" if before else ""
            table_rows.append([f"{name.strip()}, {figure} (ms)", f"{before:,.2f}", f"{after:,.2f}", change])
    return table_rows


def comparison_page(records: Sequence[RunRecord], comparison: Comparison) -> str:
    """Both runs' figures side by side and their curves over each other."""
    summaries = [comparison.a, comparison.b]
    titles = [record.title for record in records]
    settings = [[name, str(a), str(b)] for name, (a, b) in comparison.differences.items()]
    body = "<p>Same workload, same seed.</p><h2>Settings that differ</h2>" + table(["", *titles], settings)
    body += "<h2>Totals</h2>" + table(["", *titles], totals(summaries))
    body += "<h2>Times</h2>" + times_table(summaries)
    body += "<h2>Charts</h2>" + charts(run_figures(records))
    return page("Comparison", body)


def add_compare_command(subparsers: Any) -> None:
    """`python -m simulations compare`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "compare", help="two settings side by side, on the same workload and seed"
    )
    wanted = "'key=value key=value', or a JSON file of settings or of a scenario"
    parser.add_argument("a", help=wanted)
    parser.add_argument("b", help=wanted)
    parser.add_argument("--report", type=Path, metavar="DIR", help="write result.json and report.html")
    add_cost_arguments(parser)
    arguments.add_scenario_arguments(parser)
    parser.set_defaults(run=run_compare)


def run_compare(options: argparse.Namespace) -> int:
    """Prints a table. Returns the exit code; raises ConfigError."""
    scenario = arguments.read_scenario(options)
    worlds = [read_side(text, scenario.world) for text in (options.a, options.b)]
    titles = [f"{letter}: {text}"[:60] for letter, text in zip("AB", (options.a, options.b), strict=True)]
    if options.report is not None:
        check_place(options.report)
    records = compare(scenario, worlds, titles, read_cost(options))
    summaries = [summarise(record) for record in records]
    comparison = Comparison(differences=differences(worlds[0], worlds[1]), a=summaries[0], b=summaries[1])
    for name, a, b, change in [["", *titles, "change"], *rows(summaries)]:
        print(f"{name:<34} {a:>22} {b:>22} {change:>9}".rstrip())
    if options.report is not None:
        write_file(options.report / "result.json", as_json(comparison))
        write_file(options.report / "report.html", comparison_page(records, comparison).encode())
    return 0


def read_side(text: str, base: WorldSpec) -> WorldSpec:
    """The world that a positional argument means. Raises ConfigError."""
    if not text.endswith(".json"):
        try:
            return with_settings(base, parse_settings(shlex.split(text)))
        except ValueError as error:
            raise ConfigError(f"settings {text[:80]!r}: {error}") from None
    path = Path(text)
    content = read_input(path, _MAX_FILE_BYTES)
    try:
        settings = msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return read_scenario(path).world if "world" in settings else with_settings(base, settings)
