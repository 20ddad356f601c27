"""Command line arguments that commands share: which world, and which workload."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from ksana.errors import ConfigError
from simulations.scenario import Scenario
from simulations.scenarios import SCENARIOS, find_scenario
from simulations.settings import parse_settings, with_settings
from simulations.workloads.lengths import FORMS
from simulations.workloads.made_up import Texts
from simulations.workloads.spec import ClosedSpec, OpenSpec, SessionsSpec, TraceSpec, WorkloadSpec

_GROUP = "workload (without any of these: the scenario's, or 1,000 requests at one per second)"
_DEFAULTS: dict[str, Any] = {
    "trace": None,
    "limit": None,
    "speedup": 1.0,
    "requests": 1000,
    "rate": 1.0,
    "cv": 1.0,
    "users": None,
    "sessions": None,
    "turns": "uniform:1:6",
    "think": 0.0,
    "input_tokens": "512",
    "output_tokens": "128",
    "prefixes": 0,
    "prefix_tokens": "256",
}
_TEXTS = {"input_tokens", "output_tokens", "prefixes", "prefix_tokens"}
_BELONG = {
    "trace": {"limit", "speedup"},
    "sessions": _TEXTS | {"rate", "turns", "think"},
    "users": _TEXTS | {"requests", "think"},
    None: _TEXTS | {"requests", "rate", "cv"},
}
"""Which arguments mean something, by the one that names the kind of workload."""


def add_scenario_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that `read_scenario` reads, and `--seed`."""
    parser.add_argument("--scenario", metavar="NAME", help=f"{', '.join(SCENARIOS)}, or a JSON file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of the world (replicas, routing, ...) or of its engines (num_fa_blocks, max_num_seqs, ...)",
    )
    parser.add_argument("--seed", type=int, default=0)
    group = parser.add_argument_group(_GROUP)
    group.add_argument("--trace", metavar="PATH", help="recorded: Mooncake, workload.jsonl, Azure, a journal")
    group.add_argument("--limit", type=int, metavar="N", help="only so many requests of the trace")
    group.add_argument("--speedup", type=float, metavar="X", help="of the trace's arrivals")
    group.add_argument("--requests", type=int, metavar="N", help="made-up requests (1000)")
    group.add_argument("--rate", type=float, metavar="PER_S", help="of arrivals (1)")
    group.add_argument("--cv", type=float, help="of the gaps; 1: Poisson (the default), above: bursts")
    group.add_argument("--users", type=int, metavar="N", help="who wait for answers, instead of a rate")
    group.add_argument("--sessions", type=int, metavar="N", help="conversations instead of single requests")
    group.add_argument("--turns", metavar="LENGTHS", help="of a conversation (uniform:1:6)")
    group.add_argument("--think", type=float, metavar="S", help="mean pause before asking again (0)")
    group.add_argument("--input-tokens", metavar="LENGTHS", help=f"{FORMS} (512)")
    group.add_argument("--output-tokens", metavar="LENGTHS", help="(128)")
    group.add_argument("--prefixes", type=int, metavar="N", help="shared system prompts (0)")
    group.add_argument("--prefix-tokens", metavar="LENGTHS", help="(256)")


def read_scenario(options: argparse.Namespace) -> Scenario:
    """The scenario (one plain engine, if none is named) with what is set and asked. Raises ConfigError."""
    scenario = Scenario() if options.scenario is None else find_scenario(options.scenario)
    world = with_settings(scenario.world, parse_settings(options.set))
    changed = msgspec.structs.replace(scenario, world=world, seed=options.seed)
    is_asked = any(getattr(options, name) is not None for name in _DEFAULTS)
    if is_asked or (changed.workload is None and not changed.requests):
        changed = msgspec.structs.replace(changed, workload=_workload(options), requests=())
    changed.check()
    return changed


def _workload(options: argparse.Namespace) -> WorkloadSpec:
    def given(name: str) -> Any:
        value = getattr(options, name)
        return _DEFAULTS[name] if value is None else value

    _refuse_what_means_nothing(options)
    if options.trace is not None:
        return TraceSpec(path=options.trace, limit=options.limit, speedup=given("speedup"))
    texts = Texts(
        input_tokens=given("input_tokens"),
        output_tokens=given("output_tokens"),
        num_prefixes=given("prefixes"),
        prefix_tokens=given("prefix_tokens"),
    )
    rate_per_s, num_requests, think_s = given("rate"), given("requests"), given("think")
    if options.sessions is not None:
        return SessionsSpec(
            texts=texts,
            num_sessions=options.sessions,
            rate_per_s=rate_per_s,
            turns=given("turns"),
            think_s=think_s,
        )
    if options.users is not None:
        return ClosedSpec(texts=texts, num_users=options.users, num_requests=num_requests, think_s=think_s)
    return OpenSpec(texts=texts, num_requests=num_requests, rate_per_s=rate_per_s, cv=given("cv"))


def _refuse_what_means_nothing(options: argparse.Namespace) -> None:
    kinds = [kind for kind in _BELONG if kind is not None and getattr(options, kind) is not None]
    kind = kinds[0] if kinds else None
    for name in _DEFAULTS:
        if name not in _BELONG[kind] and name != kind and getattr(options, name) is not None:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} means nothing {f'with --{kind}' if kind else 'by itself'}")
