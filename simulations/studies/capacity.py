"""How many requests per second a model serves on a device within a TTFT and a TPOT target.

Each trial is a simulation of the same requests at another rate; the border is bracketed, then bisected, for
several seeds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from ksana.errors import ConfigError
from simulations.arguments import add_scenario_arguments, read_scenario
from simulations.costed import add_cost_arguments, read_cost
from simulations.reports.capacity_report import HEADER, NAMES, Capacity, answer_text, capacity_page, probe_row
from simulations.reports.report import check_place, write_file
from simulations.reports.summary import Target, as_json
from simulations.studies.probes import Probe, Question, probe, probe_alone, probe_flood
from simulations.studies.rate_search import Bracket, search_rate
from simulations.workloads.spec import OpenSpec, TraceSpec

_FIRST_FACTOR = 1.25
"""By which the first search goes down from what a flood is served at."""
_NEAR = 1.1
"""Factor by which a later seed's search begins to look around the first one's answer."""

LEAST_REQUESTS = 3000
"""With fewer, a queue that would grow for ever looks like a short one."""


def find_capacity(
    question: Question,
    *,
    seeds: Sequence[int],
    tolerance: float = 0.03,
    jobs: int = 1,
    told: Callable[[Probe], None],
) -> Capacity:
    """Search. `told` is given every trial. A recorded trace has one rhythm, so that one seed is enough.

    `jobs`: so many processes for the seeds after the first. Raises ConfigError.
    """
    alone = probe_alone(question)
    told(alone)
    flood = probe_flood(question, seeds[0])
    told(flood)
    searches: list[Search] = []
    if alone.holds and flood.rate_per_s > 0:
        searches.append(search_seed(question, seeds[0], flood.rate_per_s, _FIRST_FACTOR, tolerance, told))
        near = searches[0].bracket.holds
        if near is not None and len(seeds) > 1:
            searches += _other_seeds(question, seeds[1:], near, tolerance, jobs, told)
    brackets = [search.bracket for search in searches]
    held = [bracket.holds for bracket in brackets if bracket.holds is not None]
    rate_per_s = statistics.fmean(held) if held else None
    return Capacity(
        question=question,
        alone=alone,
        flood=flood,
        probes=tuple(one for search in searches for one in search.probes),
        brackets=tuple(brackets),
        rate_per_s=rate_per_s,
        longer=_twice_as_long(question, seeds[0], rate_per_s, told),
        is_bounded=not brackets or any(bracket.breaks is not None for bracket in brackets),
        limited_by=_limits(searches, alone),
    )


class Search(msgspec.Struct, frozen=True):
    """What was found, and tried, for one seed."""

    bracket: Bracket
    probes: tuple[Probe, ...]


def search_seed(
    question: Question,
    seed: int,
    start: float,
    first_factor: float,
    tolerance: float,
    told: Callable[[Probe], None] | None = None,
) -> Search:
    """The border for one seed, from `start` on."""
    probes: list[Probe] = []

    def does_hold(rate_per_s: float) -> bool:
        probes.append(probe(question, rate_per_s, seed))
        if told is not None:
            told(probes[-1])
        return probes[-1].holds

    bracket = search_rate(does_hold, start, first_factor=first_factor, tolerance=tolerance)
    return Search(bracket, tuple(probes))


def _other_seeds(
    question: Question,
    seeds: Sequence[int],
    near: float,
    tolerance: float,
    jobs: int,
    told: Callable[[Probe], None],
) -> list[Search]:
    if jobs == 1:
        return [search_seed(question, seed, near, _NEAR, tolerance, told) for seed in seeds]
    with ProcessPoolExecutor(jobs) as pool:
        started = [pool.submit(search_seed, question, seed, near, _NEAR, tolerance) for seed in seeds]
        searches = [search.result() for search in started]
    for search in searches:
        for one in search.probes:
            told(one)
    return searches


def _twice_as_long(
    question: Question, seed: int, rate_per_s: float | None, told: Callable[[Probe], None]
) -> Probe | None:
    """The answer tried with twice as many requests: does it last? A recorded trace has no more."""
    if rate_per_s is None or isinstance(question.workload, TraceSpec):
        return None
    more = msgspec.structs.replace(question.workload, num_requests=2 * question.workload.num_requests)
    longer = probe(msgspec.structs.replace(question, workload=more), rate_per_s, seed)
    told(longer)
    return longer


def _limits(searches: Sequence[Search], alone: Probe) -> tuple[str, ...]:
    """What was too high right above the borders."""
    broken = [one for s in searches for one in s.probes if one.rate_per_s == s.bracket.breaks]
    return tuple(sorted({name for one in broken or [alone] for name in one.broken}))


def add_capacity_command(subparsers: Any) -> None:
    """`python -m simulations capacity`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "capacity", help="how many requests per second are served within a TTFT and TPOT target"
    )
    parser.add_argument("--ttft-ms", type=float, required=True, help="time to first token, from arrival")
    parser.add_argument("--tpot-ms", type=float, required=True, help="mean time per output token after it")
    parser.add_argument("--percentile", type=float, default=99.0, help="of requests that must be within (99)")
    parser.add_argument("--seeds", type=int, default=3, help="so many searches (3; of a trace 1)")
    parser.add_argument("--tolerance", type=float, default=0.03, help="of the border, relative (0.03)")
    parser.add_argument("--jobs", type=int, default=1, help="processes for the seeds after the first (1)")
    parser.add_argument("--report", type=Path, metavar="DIR", help="write capacity.json and capacity.html")
    add_cost_arguments(parser)
    add_scenario_arguments(parser)
    parser.set_defaults(run=run_capacity)


def run_capacity(options: argparse.Namespace) -> int:
    """Prints every trial, and the answer. Returns the exit code; raises ConfigError."""
    if options.report is not None:
        check_place(options.report)
    question, seeds = read_question(options)
    widths = [11, 5, 7, 7, 10, 10, 8]
    print("  ".join(text.rjust(width) for text, width in zip(HEADER, widths, strict=True)))
    num_told = 0

    def tell(one: Probe) -> None:
        nonlocal num_told
        row = probe_row(one, NAMES[num_told] if num_told < len(NAMES) else "")
        num_told += 1
        print("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)), flush=True)

    capacity = find_capacity(question, seeds=seeds, tolerance=options.tolerance, jobs=options.jobs, told=tell)
    print(answer_text(capacity))
    if options.report is not None:
        write_file(options.report / "capacity.json", as_json(capacity))
        write_file(options.report / "capacity.html", capacity_page(capacity).encode())
    return 0


def read_question(options: argparse.Namespace) -> tuple[Question, range]:
    """Raises ConfigError."""
    scenario = read_scenario(options)
    workload = scenario.workload
    if not isinstance(workload, OpenSpec | TraceSpec):
        raise ConfigError("a capacity search varies the rate of arrivals; this workload has none")
    if not 0 < options.percentile <= 100:
        raise ConfigError(f"--percentile goes up to 100, not {options.percentile:g}")
    if not (options.ttft_ms > 0 and options.tpot_ms > 0):
        raise ConfigError("--ttft-ms and --tpot-ms must be positive")
    if not 1 <= options.jobs <= 256:
        raise ConfigError(f"--jobs goes from 1 to 256, not {options.jobs}")
    if isinstance(workload, OpenSpec) and options.requests is None:
        num_requests = max(workload.num_requests, LEAST_REQUESTS)
        workload = msgspec.structs.replace(workload, num_requests=num_requests)
    if not 1 <= options.seeds <= 1000:
        raise ConfigError(f"--seeds goes from 1 to 1000, not {options.seeds}")
    question = Question(
        world=scenario.world,
        workload=workload,
        target=Target(ttft_s=options.ttft_ms / 1000, tpot_s=options.tpot_ms / 1000),
        percentile=options.percentile,
        cost=read_cost(options),
    )
    num_seeds = 1 if isinstance(workload, TraceSpec) else options.seeds
    return question, range(options.seed, options.seed + num_seeds)
