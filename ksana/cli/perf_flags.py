"""The flags of `ksana perf`: what may be said, and what says something only together."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ksana.cli.settings import Parser, add_settings
from ksana.errors import ConfigError
from ksana.perf.batches import DEFAULT_OUTPUT

DEMO_MODEL = "smollm2-135m"
SWEEP_LIMIT_S = 600
QUICK_LIMIT_S = 120
OPERATOR_ROUNDS = 3

ONLY_SERVING = frozenset(
    (
        *("host", "port", "api_key", "api_key_file", "allowed_origins", "max_body_bytes", "request_timeout"),
        *("drain_timeout", "max_queued_requests", "chat_template"),
        *("remote_cache_staging", "remote_cache_max_bytes", "max_remote_loads", "remote_cache_timeout"),
        "remote_write_back",
    )
)
"""Settings that say nothing for fixed steps without clients. A file or a variable, which `serve` may share,
may hold them; a flag is meant for this command."""

_OWN_FLAGS = (
    *("config", "sweep", "quick", "time_limit", "output", "fit", "num_layers", "cost_file", "plot"),
    *("operator_rounds", "settings", "unequal_kv"),
)


def parse_flags(argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The command's own flags, and those of the settings. Raises ConfigError."""
    _refuse_flags_of_serve(argv)
    arguments = vars(build_parser().parse_strictly(argv))
    own = argparse.Namespace(**{name: arguments.pop(name) for name in _OWN_FLAGS})
    _check_combination(own, arguments)
    return own, arguments


def _refuse_flags_of_serve(argv: Sequence[str]) -> None:
    for argument in argv:
        if argument == "--":
            return
        flag = argument.partition("=")[0]
        name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        if flag.startswith("--") and name in ONLY_SERVING:
            raise ConfigError(f"{flag} has no meaning for `ksana perf`, which serves nobody; leave it out")


def build_parser() -> Parser:
    parser = Parser(
        prog="ksana perf",
        usage="ksana perf [MODEL] (--config FILE | --sweep | --fit PATH) [options] [settings]",
        description="Measure fixed steps on the real engine, without serving anybody; write JSON and exit. "
        f"Without MODEL the demo model {DEMO_MODEL} is measured. Steps are planned ahead only if asked for.",
    )
    group = parser.add_argument_group("What is measured")
    group.add_argument(
        "--config", metavar="FILE", help="model_perf_config.json: batches, rounds, seed, output"
    )
    group.add_argument("--sweep", action="store_true", help="The steps that a good cost model needs")
    group.add_argument("--quick", action="store_true", help="With --sweep: fewer steps, fewer rounds")
    group.add_argument(
        "--time-limit",
        metavar="SECONDS",
        type=_positive,
        help=f"With --sweep: begin no batch after that (default: {SWEEP_LIMIT_S}, quick {QUICK_LIMIT_S})",
    )
    group.add_argument(
        "--operator-rounds",
        metavar="N",
        type=_positive_or_zero,
        default=None,
        help=f"Extra rounds in which operators are timed (default: {OPERATOR_ROUNDS}, with --sweep 0)",
    )
    group = parser.add_argument_group("What comes out")
    group.add_argument(
        "--output", metavar="FILE", help=f"With --sweep: the result (default: {DEFAULT_OUTPUT})"
    )
    group.add_argument("--plot", action="store_true", help="An HTML page with charts beside the result")
    group.add_argument("--fit", metavar="PATH", help="Measure nothing: a result, or a directory of profiles")
    group.add_argument("--num-layers", metavar="N", type=_positive, help="With --fit: layers of the profile")
    group.add_argument(
        "--unequal-kv",
        action="store_true",
        help="With --fit: refuse a profile without skew.csv, which is used where it is",
    )
    group.add_argument("--cost-file", metavar="FILE", help="Fit a cost model and write it there")
    parser.add_argument("--settings", metavar="FILE", help="Settings from a YAML file, as --config of serve")
    add_settings(parser, ONLY_SERVING)
    return parser


def _positive(text: str) -> int:
    return _number(text, 1)


def _positive_or_zero(text: str) -> int:
    return _number(text, 0)


def _number(text: str, least: int) -> int:
    if not text.isascii() or not text.isdigit() or not least <= int(text[:12]) <= 10**6:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from {least} to 1000000")
    return int(text)


def _check_combination(own: argparse.Namespace, settings: dict[str, object]) -> None:
    """Raises ConfigError for flags that say nothing together."""
    modes = [name for name in ("config", "sweep", "fit") if getattr(own, name)]
    if len(modes) != 1:
        given = " and ".join(f"--{mode}" for mode in modes) or "neither was given"
        raise ConfigError(f"give one of --config, --sweep and --fit ({given}); see ksana perf --help")
    mode = modes[0]
    only_for = {
        "quick": ("sweep",),
        "time_limit": ("sweep",),
        "output": ("sweep",),
        "num_layers": ("fit",),
        "unequal_kv": ("fit",),
        "plot": ("config", "sweep"),
        "operator_rounds": ("config", "sweep"),
        "settings": ("config", "sweep"),
    }
    for name, allowed in only_for.items():
        if getattr(own, name) not in (None, False) and mode not in allowed:
            raise ConfigError(f"--{name.replace('_', '-')} has no meaning with --{mode}")
    if mode == "fit":
        if own.cost_file is None:
            raise ConfigError("--fit needs --cost-file: where the cost model is to be written")
        given_settings = [name for name, value in settings.items() if value is not None]
        if given_settings:
            name = given_settings[0]
            shown = name if name == "MODEL" else "--" + name.replace("_", "-")
            raise ConfigError(f"{shown} has no meaning with --fit, which measures nothing")
