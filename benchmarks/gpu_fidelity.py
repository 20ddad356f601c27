"""How close a simulated run comes to a recorded one on GPUs, its cost made of profile tables alone.

    python -m benchmarks.gpu_fidelity DIRECTORY [--again 8]

The directory holds the profile tables (`ksana.perf.profile_tables`) and the recorded run
(`benchmarks.recorded_run`). `--again N` simulates N times more, every request up to a millisecond earlier or
later: what becomes of a full engine turns on such things, so that a single run, the recorded one as well, is
one of many that might have been. Nothing here is fitted to the run: docs/fidelity.md has every choice.

Sizes of the model are read from config.json in the directory, or known by its name, or given (--num-layers
and so on). Devices that share a model need communication.csv (op,num_devices,bytes,us), or --link-gb-per-s
and --link-latency-us: the bandwidth out of one device, and the time until the first byte arrives.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.recorded_run import KvCache, RecordedRun, read_run
from benchmarks.recorded_world import Simulated, simulate
from benchmarks.serving_figures import Times, compare_samples, figures, print_figures, print_spread
from ksana.costs.communication import Link
from ksana.costs.cost_file import CostModel
from ksana.costs.profile_cost import ProfileTables
from ksana.errors import ConfigError, KsanaError
from ksana.perf.fitting import fit_profile
from ksana.perf.model_shape import ModelShape, tables_of
from ksana.perf.parallel import Spread
from ksana.perf.profile_tables import missing_kinds


def recorded_times(run: RecordedRun) -> tuple[Times, ...]:
    """On the engine's clock. The client's is moved onto it by the least delay that was seen between them.

    Raises ConfigError when these are not the requests of the workload.
    """
    if not run.served or len(run.served) != len(run.asked):
        raise ConfigError(f"{len(run.asked)} requests were asked and {len(run.served)} served")
    offset_s = min(served.queued_ts - served.arrival_time for served in run.served)
    return tuple(
        Times(
            served.arrival_time + offset_s,
            served.queued_ts,
            served.scheduled_ts,
            served.first_token_ts,
            served.last_token_ts,
            served.output_toks,
        )
        for served in run.served
    )


def moved(run: RecordedRun, seed: int) -> RecordedRun:
    """The same run, every arrival up to a millisecond earlier or later (in the same order)."""
    rng = random.Random(seed)
    times = sorted(max(0, asked.arrival_time_ns + rng.randint(-(10**6), 10**6)) for asked in run.asked)
    asked = tuple(
        msgspec.structs.replace(asked, arrival_time_ns=time)
        for asked, time in zip(run.asked, times, strict=True)
    )
    return msgspec.structs.replace(run, asked=asked)


def main(arguments: Sequence[str] | None = None) -> int:
    """0: every judged figure is within its bound; 1: one is not; 2: a file is wrong, or something is
    missing."""
    options = _parser().parse_args(arguments)
    try:
        run = _with_blocks(read_run(options.directory), options.num_blocks)
        model = _fitted(run, options)
        cost = CostModel(model.data, allow_extrapolation=True)
        recorded = recorded_times(run)
        simulated = simulate(run, cost.step)
        again = [simulate(moved(run, seed), cost.step).times for seed in range(options.again)]
    except KsanaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    _print_set_up(run, model, options.directory)
    _print_simulated(simulated, cost.num_extrapolated)
    table = figures(recorded, simulated.times)
    print_figures(table)
    compare_samples(run.samples, simulated.samples)
    if again:
        print_spread([figures(recorded, times) for times in again])
    print("the tables' own errors on what was held out of them, percent:")
    for kind, held_out in model.errors.items():
        print(f"  {kind:55} mean {held_out.mean_abs_pct:6.2f}   most {held_out.max_abs_pct:6.2f}")
    return 0 if all(figure.is_within for figure in table) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=Path)
    for name, what in (
        ("num-layers", "decoder layers of the model"),
        ("hidden-size", "numbers per token between its layers"),
        ("kv-heads", "KV heads of a layer"),
        ("vocab-size", "logits per row"),
        ("num-blocks", "KV blocks of an engine, where meta.json does not have them"),
    ):
        parser.add_argument(f"--{name}", type=_positive, help=what)
    parser.add_argument(
        "--link-gb-per-s", type=float, help="bandwidth out of one device, 10^9 bytes a second"
    )
    parser.add_argument("--link-latency-us", type=float, help="latency between two devices")
    parser.add_argument("--again", type=int, default=0, metavar="N", help="simulate N times more (0)")
    return parser


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:12]) <= 1 << 24:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from 1 to {1 << 24}")
    return int(text)


def _with_blocks(run: RecordedRun, num_blocks: int | None) -> RecordedRun:
    if num_blocks is None:
        return run
    known = run.meta.kv_cache or KvCache()
    kv_cache = msgspec.structs.replace(known, num_gpu_blocks=num_blocks)
    return msgspec.structs.replace(run, meta=msgspec.structs.replace(run.meta, kv_cache=kv_cache))


def _fitted(run: RecordedRun, options: argparse.Namespace) -> CostModel:
    """Raises ConfigError."""
    engine = run.meta.engine_kwargs
    return fit_profile(
        options.directory,
        stated=ModelShape(
            num_layers=options.num_layers,
            hidden_size=options.hidden_size,
            kv_heads=options.kv_heads,
            vocab_size=options.vocab_size,
        ),
        model=run.meta.model,
        spread=Spread(
            tensor=engine.tensor_parallel_size,
            data=engine.data_parallel_size,
            is_expert_parallel=engine.enable_expert_parallel,
        ),
        link=_link(options),
    )


def _link(options: argparse.Namespace) -> Link | None:
    bandwidth, latency = options.link_gb_per_s, options.link_latency_us
    if bandwidth is None and latency is None:
        return None
    if bandwidth is None or latency is None:
        raise ConfigError("a link is stated by --link-gb-per-s and --link-latency-us, both of them")
    if not (0 < bandwidth <= 1e6 and 0 <= latency <= 1e6):
        raise ConfigError(f"a link of {bandwidth:g} GB/s and {latency:g} us is none")
    return Link(bytes_per_s=bandwidth * 1e9, latency_s=latency * 1e-6)


def _print_set_up(run: RecordedRun, model: CostModel, directory: Path) -> None:
    tables = model.data
    assert isinstance(tables, ProfileTables)
    engine = run.meta.engine_kwargs
    print(
        f"{run.meta.model}, {len(run.asked)} requests, {tables.num_layers} decoder layers, "
        f"{engine.data_parallel_size} engine(s) of {engine.tensor_parallel_size} device(s)"
    )
    if missing := missing_kinds(tables):
        print(
            f"NOTE: the tables have no {', '.join(missing)}: what these take is left out, expect too little"
        )
    if engine.tensor_parallel_size > 1 and tables_of(directory, engine.tensor_parallel_size) == directory:
        print(f"NOTE: the tables are taken to be of one device's share of {engine.tensor_parallel_size}")
    if tables.communication is not None:
        for exchange in tables.communication.exchanges:
            each = "row" if exchange.of_rows else "token"
            print(
                f"  {exchange.per_step} times a step: {exchange.operation} over "
                f"{exchange.num_devices} devices, {exchange.bytes_each:g} bytes per {each}"
            )


def _print_simulated(simulated: Simulated, num_extrapolated: int) -> None:
    print(
        f"simulated: {simulated.num_steps} steps, {simulated.num_preemptions} preemptions, "
        f"{simulated.num_cached_tokens} of {simulated.num_prompt_tokens} prompt tokens cached; "
        f"{num_extrapolated} steps outside tables"
    )


if __name__ == "__main__":
    sys.exit(main())
