"""`ksana perf`: measure fixed steps on the real engine, write a result, make a cost model of it.

ksana perf MODEL --config model_perf_config.json     what the file says
ksana perf MODEL --sweep --cost-file cost.json       the shapes that a cost model needs, and the model
ksana perf --fit RESULT --cost-file cost.json        a cost model of a result, or of profile tables
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import trio

from ksana.atomic_file import write_atomically
from ksana.cli.loading import LoadingBar
from ksana.cli.logs import configure_logging
from ksana.cli.perf_fit import check_enough, fit, fit_measured
from ksana.cli.perf_flags import (
    DEMO_MODEL,
    OPERATOR_ROUNDS,
    QUICK_LIMIT_S,
    SWEEP_LIMIT_S,
    parse_flags,
)
from ksana.cli.rounds_bar import RoundsBar
from ksana.cli.settings import Given, Layer, flags_layer, merge, read_environment, read_file
from ksana.config import Settings
from ksana.devices.backend import WorkerLostError
from ksana.errors import ConfigError, ServiceError
from ksana.model_setup import find_model
from ksana.perf.batch_run import Rounds
from ksana.perf.batches import DEFAULT_OUTPUT, Batch, PerfConfig, read_batches, read_config, write_batches
from ksana.perf.limits import Limits, check_batches
from ksana.perf.measure import fixed_settings, limits_of, measure
from ksana.perf.output_files import check_outputs
from ksana.perf.report import result_page, summary_table
from ksana.perf.result import PerfResult, write_result
from ksana.perf.sweep import sweep_batches

SWEEP_ROUNDS = Rounds(warmup=1, stat=5, operator=0, enough_s=2.0)
SWEEP_PASSES = 2
QUICK_ROUNDS = Rounds(warmup=1, stat=5, operator=0, enough_s=1.0)


def run(argv: Sequence[str]) -> int:
    own, arguments = parse_flags(argv)
    if own.fit is not None:
        return fit(Path(own.fit), Path(own.cost_file), own.num_layers, unequal_kv=own.unequal_kv)
    settings = _settings(own, flags_layer(arguments))
    configure_logging(settings.log_level)
    return measure_and_report(own, settings)


def _settings(own: argparse.Namespace, flags: Layer) -> Settings:
    """As for `serve`, but nothing is planned ahead unless asked for, and there is a default model."""
    environment = read_environment(os.environ)
    file = {} if own.settings is None else read_file(Path(own.settings))
    defaults = {
        "plan_ahead": Given(False, "default", is_text=False),
        "model": Given(DEMO_MODEL, "default", is_text=False),
    }
    settings = merge([flags, environment, file, defaults])
    if settings.remote_cache is not None:
        raise ConfigError(
            "remote_cache has no meaning for `ksana perf`: no KV is loaded or saved; leave it out"
        )
    return settings


def measure_and_report(own: argparse.Namespace, settings: Settings) -> int:
    """The exit code: 1 when a batch failed, 130 or 143 when a signal ended it early."""
    config = None if own.config is None else read_config(Path(own.config))
    batches = None if config is None else read_batches(config.batch_config_file)
    output = Path(own.output or DEFAULT_OUTPUT) if config is None else config.output_file
    _check_files(own, settings, config, output)
    if batches is not None and config is not None and own.cost_file is not None:
        check_enough(config.batch_config_file, batches)
    settings = fixed_settings(settings)
    bar = LoadingBar(sys.stderr)
    files = find_model(settings, bar.say)
    limits = limits_of(settings, files)
    time_limit_s: float | None = None
    num_passes = 1
    if config is None or batches is None:
        config, batches = _plan_sweep(own, output, limits)
        if own.cost_file is not None:
            check_enough(config.batch_config_file, batches)
        rounds = QUICK_ROUNDS if own.quick else SWEEP_ROUNDS
        num_passes = 1 if own.quick else SWEEP_PASSES
        time_limit_s = own.time_limit or (QUICK_LIMIT_S if own.quick else SWEEP_LIMIT_S)
    else:
        check_batches(config.batch_config_file, batches, limits)
        rounds = Rounds(warmup=config.warmup_rounds, stat=config.stat_rounds, operator=OPERATOR_ROUNDS)
    if own.operator_rounds is not None:
        rounds = msgspec.structs.replace(rounds, operator=own.operator_rounds)

    with RoundsBar(bar, num_passes * len(batches), rounds.total) as rounds_bar:
        try:
            result = trio.run(
                lambda: measure(
                    settings,
                    files,
                    batches,
                    rounds=rounds,
                    seed=config.seed,
                    num_passes=num_passes,
                    time_limit_s=time_limit_s,
                    on_round=rounds_bar,
                    report=bar.say,
                    progress=bar,
                    signals=(signal.SIGINT, signal.SIGTERM),
                )
            )
        except WorkerLostError as error:
            raise ServiceError(str(error)) from error
    try:
        write_result(output, result)
        return _report(own, output, result)
    except BrokenPipeError:
        raise
    except OSError as error:  # as when the disk has become full meanwhile
        raise ServiceError(f"cannot write beside {output}: {error.strerror}") from error


def _check_files(
    own: argparse.Namespace, settings: Settings, config: PerfConfig | None, output: Path
) -> None:
    """What is written replaces nothing that is read, nor each other. Raises ConfigError."""
    inputs = {"model": settings.model, "--config file": own.config, "--settings file": own.settings}
    if config is not None:
        inputs["batch_config_file"] = config.batch_config_file
    outputs = {
        "output_file": output,
        "file of batches": None if config is not None else _batches_file(output),
        "--plot page": _page_file(output) if own.plot else None,
        "--cost-file": own.cost_file,
    }
    check_outputs(
        {name: Path(path) for name, path in inputs.items() if path is not None},
        {name: Path(path) for name, path in outputs.items() if path is not None},
    )


def _batches_file(output: Path) -> Path:
    return output.with_name(f"{output.stem}_batches.json")


def _page_file(output: Path) -> Path:
    return output.with_suffix(".html")


def _plan_sweep(own: argparse.Namespace, output: Path, limits: Limits) -> tuple[PerfConfig, list[Batch]]:
    """Chooses the batches, and leaves them beside the result for whoever wants to run them again."""
    batches = sweep_batches(limits, quick=own.quick)
    file = _batches_file(output)
    try:
        write_batches(file, batches)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None
    print(f"{len(batches)} batches, written to {file}", file=sys.stderr)
    return PerfConfig(batch_config_file=file, output_file=output), batches


def _report(own: argparse.Namespace, output: Path, result: PerfResult) -> int:
    print(summary_table(result))
    failed = [batch for batch in result.batches if batch.error is not None]
    for batch in failed:
        print(f"ksana: batch {batch.name!r} failed: {batch.error}", file=sys.stderr)
    if result.interrupted is not None:
        num_all = len(result.batches) + len(result.skipped)
        print(
            f"ksana: interrupted by {result.interrupted}: the result has {len(result.batches)} of {num_all} "
            "batches",
            file=sys.stderr,
        )
    elif result.skipped:
        print(f"ksana: the time limit left out {len(result.skipped)} batches", file=sys.stderr)
    print(f"result: {output}")
    if own.plot:
        plot = _page_file(output)
        write_atomically(plot, result_page(result).encode())
        print(f"charts: {plot}")
    if result.interrupted is not None:
        if own.cost_file is not None:
            print(f"ksana: no cost model was made; see ksana perf --fit {output}", file=sys.stderr)
        return 128 + signal.Signals[result.interrupted]
    if own.cost_file is not None:
        fit_measured(output, Path(own.cost_file))
    return 1 if failed else 0
