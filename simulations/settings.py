"""What commands let their user set: the world and its engines, the step cost, and the workload."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ksana.errors import ConfigError
from simulations.engine import EngineSpec
from simulations.scenario import WorldSpec, read_scenario
from simulations.workloads.lengths import FORMS
from simulations.workloads.made_up import Texts
from simulations.workloads.spec import ClosedSpec, OpenSpec, SessionsSpec, TraceSpec, WorkloadSpec


def with_settings(world: WorldSpec, settings: Mapping[str, Any]) -> WorldSpec:
    """The world with these fields of its own, or of all its engines, set. Raises ConfigError."""
    of_engines = {name: value for name, value in settings.items() if name in EngineSpec.__struct_fields__}
    of_world = {name: value for name, value in settings.items() if name not in of_engines}
    for name in of_world:
        if name not in WorldSpec.__struct_fields__:
            raise ConfigError(f"there is no setting {name!r}; there are {', '.join(_all_names())}")
    engines = [msgspec.to_builtins(engine) | of_engines for engine in world.engines]
    try:
        changed = msgspec.convert(msgspec.to_builtins(world) | {"engines": engines} | of_world, WorldSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(f"settings: {error}") from None
    changed.check()
    return changed


def _all_names() -> list[str]:
    return sorted({*EngineSpec.__struct_fields__, *WorldSpec.__struct_fields__})


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """`key=value` texts; a value is JSON or, if it is none, text. Raises ConfigError."""
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"a setting is written key=value, not {text[:80]!r}")
        try:
            settings[name.strip().replace("-", "_")] = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            settings[name.strip().replace("-", "_")] = value
    return settings


def add_world_arguments(parser: argparse.ArgumentParser) -> None:
    """`--scenario`, `--set`, `--seed`; `read_world` reads the first two."""
    parser.add_argument("--scenario", type=Path, metavar="FILE", help="a world as JSON, its requests unused")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of the world (replicas, routing, ...) or of its engines (num_fa_blocks, max_num_seqs, ...)",
    )
    parser.add_argument("--seed", type=int, default=0)


def read_world(options: argparse.Namespace) -> WorldSpec:
    """The scenario's world, or a world of one engine, with what is set. Raises ConfigError."""
    world = WorldSpec() if options.scenario is None else read_scenario(options.scenario).world
    return with_settings(world, parse_settings(options.set))


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that `read_workload` reads."""
    group = parser.add_argument_group("workload")
    group.add_argument("--trace", metavar="PATH", help="recorded: Mooncake, workload.jsonl or Azure")
    group.add_argument("--limit", type=int, metavar="N", help="only so many requests of the trace")
    group.add_argument("--speedup", type=float, default=1.0, help="of the trace's arrivals")
    group.add_argument("--requests", type=int, default=1000, help="made-up requests (default 1000)")
    group.add_argument("--rate", type=float, default=1.0, metavar="PER_S", help="of arrivals (default 1)")
    group.add_argument("--cv", type=float, default=1.0, help="1: Poisson (default), above: bursts")
    group.add_argument("--users", type=int, metavar="N", help="who wait for answers, instead of a rate")
    group.add_argument("--sessions", type=int, metavar="N", help="conversations instead of single requests")
    group.add_argument("--turns", default="uniform:1:6", metavar="LENGTHS", help="of a conversation")
    group.add_argument("--think", type=float, default=0.0, metavar="S", help="mean pause before asking again")
    group.add_argument("--input-tokens", default="512", metavar="LENGTHS", help=FORMS)
    group.add_argument("--output-tokens", default="128", metavar="LENGTHS")
    group.add_argument("--prefixes", type=int, default=0, metavar="N", help="shared system prompts")
    group.add_argument("--prefix-tokens", default="256", metavar="LENGTHS")


def read_workload(options: argparse.Namespace) -> WorkloadSpec:
    """Raises ConfigError."""
    if options.trace is not None:
        return TraceSpec(path=options.trace, limit=options.limit, speedup=options.speedup)
    texts = Texts(
        input_tokens=options.input_tokens,
        output_tokens=options.output_tokens,
        num_prefixes=options.prefixes,
        prefix_tokens=options.prefix_tokens,
    )
    if options.sessions is not None:
        return SessionsSpec(
            texts=texts,
            num_sessions=options.sessions,
            rate_per_s=options.rate,
            turns=options.turns,
            think_s=options.think,
        )
    if options.users is not None:
        return ClosedSpec(
            texts=texts, num_users=options.users, num_requests=options.requests, think_s=options.think
        )
    return OpenSpec(texts=texts, num_requests=options.requests, rate_per_s=options.rate, cv=options.cv)
