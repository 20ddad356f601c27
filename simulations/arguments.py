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
from simulations.workloads.spec import ClosedSpec, OpenSpec, SessionsSpec, TraceSpec, WorkloadSpec

_TEXTS = {
    "input_tokens": "input_tokens",
    "output_tokens": "output_tokens",
    "prefixes": "num_prefixes",
    "prefix_tokens": "prefix_tokens",
}
_FIELDS = {
    "trace": {"trace": "path", "limit": "limit", "speedup": "speedup"},
    "sessions": {"sessions": "num_sessions", "rate": "rate_per_s", "turns": "turns", "think": "think_s"},
    "users": {"users": "num_users", "requests": "num_requests", "think": "think_s"},
    "open": {"requests": "num_requests", "rate": "rate_per_s", "cv": "cv"},
}
"""By kind of workload, which argument is which field; the first three have an argument that names them."""
_KINDS: dict[str, type[WorkloadSpec]] = {
    "trace": TraceSpec,
    "sessions": SessionsSpec,
    "users": ClosedSpec,
    "open": OpenSpec,
}


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
    add_workload_arguments(parser)


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that `with_workload` reads."""
    group = parser.add_argument_group("workload", "what is not given is as in the scenario")
    group.add_argument("--trace", metavar="PATH", help="recorded: Mooncake, workload.jsonl, Azure, a journal")
    group.add_argument("--limit", type=int, metavar="N", help="only so many requests of the trace")
    group.add_argument("--speedup", type=float, metavar="X", help="of the trace's arrivals")
    group.add_argument("--requests", type=int, metavar="N", help="made-up requests")
    group.add_argument("--rate", type=float, metavar="PER_S", help="of arrivals")
    group.add_argument("--cv", type=float, help="of the gaps between arrivals; 1: Poisson, above: bursts")
    group.add_argument("--users", type=int, metavar="N", help="who wait for answers, instead of a rate")
    group.add_argument("--sessions", type=int, metavar="N", help="conversations instead of single requests")
    group.add_argument("--turns", metavar="LENGTHS", help="of a conversation")
    group.add_argument("--think", type=float, metavar="S", help="mean pause before asking again")
    group.add_argument("--input-tokens", metavar="LENGTHS", help=FORMS)
    group.add_argument("--output-tokens", metavar="LENGTHS")
    group.add_argument("--prefixes", type=int, metavar="N", help="shared system prompts")
    group.add_argument("--prefix-tokens", metavar="LENGTHS")


def read_scenario(options: argparse.Namespace) -> Scenario:
    """The scenario (one plain engine, if none is named) with what is set and asked. Raises ConfigError."""
    scenario = Scenario() if options.scenario is None else find_scenario(options.scenario)
    world = with_settings(scenario.world, parse_settings(options.set))
    changed = msgspec.structs.replace(scenario, world=world, seed=options.seed)
    if scenario.workload is None and not scenario.requests:
        changed = msgspec.structs.replace(changed, workload=_workload({}, None))
    changed = with_workload(changed, options)
    changed.check()
    return changed


def with_workload(scenario: Scenario, options: argparse.Namespace) -> Scenario:
    """The scenario with what the arguments ask instead. Raises ConfigError."""
    given = _given(options)
    if not given:
        return scenario
    return msgspec.structs.replace(scenario, workload=_workload(given, scenario.workload), requests=())


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """Workload arguments that are there."""
    names = {name for fields in (*_FIELDS.values(), _TEXTS) for name in fields}
    return {name: getattr(options, name) for name in sorted(names) if getattr(options, name) is not None}


def _workload(given: dict[str, Any], base: WorkloadSpec | None) -> WorkloadSpec:
    """`base`, changed as given; or another kind, if one is named. Raises ConfigError."""
    named = [kind for kind in _FIELDS if kind in given]
    of_base = next((kind for kind, spec in _KINDS.items() if isinstance(base, spec)), "open")
    kind = named[0] if named else of_base
    texts = {} if kind == "trace" else _TEXTS
    for name in given:
        if name not in _FIELDS[kind] and name not in texts:
            raise ConfigError(f"--{name.replace('_', '-')} means nothing for this workload ({kind})")
    fields = {} if base is None or kind != of_base else msgspec.to_builtins(base)
    if texts:
        changes = {texts[name]: value for name, value in given.items() if name in texts}
        fields["texts"] = fields.get("texts", {}) | changes
    fields |= {_FIELDS[kind][name]: value for name, value in given.items() if name in _FIELDS[kind]}
    try:
        return msgspec.convert(fields, _KINDS[kind])
    except msgspec.ValidationError as error:
        raise ConfigError(f"workload: {error}") from None
