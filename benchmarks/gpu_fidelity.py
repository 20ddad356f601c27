"""How close a simulated run comes to a recorded one on a GPU, its cost made of profile tables alone.

    python -m benchmarks.gpu_fidelity DIRECTORY [--num-layers 32] [--again 8]

The directory holds the profile tables (`ksana.perf.profile_tables`) and the recorded run
(`benchmarks.recorded_run`). `--again N` simulates N times more, every request up to a millisecond earlier or
later: what becomes of a full engine turns on such things, so that a single run, the recorded one as well, is
one of many that might have been. Nothing here is fitted to the run: docs/fidelity.md has every choice.
"""

from __future__ import annotations

import argparse
import random
import sys
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import msgspec
import trio

from benchmarks.recorded_run import KvCache, RecordedRun, Sample, read_run
from benchmarks.serving_figures import Times, compare_samples, figures, print_figures, print_spread
from ksana.cli.main import expected_cause
from ksana.costs.cost_file import CostModel
from ksana.costs.step_cost import StepCost
from ksana.devices.simulated_worker import KnownRequest
from ksana.errors import ConfigError, KsanaError
from ksana.messages.outputs import Finished, StepOutputs
from ksana.messages.requests import AddRequest, SamplingParams
from ksana.messages.steps import StepDone
from ksana.perf.fitting import fit_profile
from ksana.runtime.actor import Address, Said
from ksana.runtime.deterministic import run_deterministic
from ksana.runtime.virtual_clock import VirtualClock
from simulations.engine import EngineSpec, SimulatedEngine

_FIRST_TOKEN, _NUM_TOKENS = 1000, 100_000


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    times: tuple[Times, ...]
    samples: tuple[Sample, ...]
    num_steps: int
    num_preemptions: int
    num_cached_tokens: int
    num_prompt_tokens: int


def engine_spec(run: RecordedRun) -> EngineSpec:
    """The simulated engine, set up as the recorded one was. That one keeps block 0 for padding."""
    meta = run.meta
    if meta.kv_cache is None:
        raise ConfigError("meta.json does not tell how many KV blocks the engine had; give --num-blocks")
    num_engines = meta.engine_kwargs.data_parallel_size
    if num_engines > 1:
        raise ConfigError(f"{num_engines} engines were recorded (data_parallel_size), one is simulated")
    scheduler = meta.resolved_config.scheduler_config
    longest = max(len(asked.input_tok_ids) + asked.output_toks for asked in run.asked)
    return EngineSpec(
        block_size=meta.kv_cache.block_size,
        num_fa_blocks=meta.kv_cache.num_gpu_blocks - 1,
        max_num_seqs=meta.engine_kwargs.max_num_seqs,
        max_num_batched_tokens=meta.engine_kwargs.max_num_batched_tokens,
        max_model_len=meta.max_model_len or longest + 1,
        admission="whole_prompt" if scheduler.scheduler_reserve_full_isl else "first_chunk",
        hold_when_short=True,
        plan_ahead=scheduler.async_scheduling,
        enable_prefix_caching=meta.kv_cache.enable_prefix_caching,
        start_time_s=0.0,
    )


class _World:
    """One engine and the clients of the workload, who ask when they did."""

    def __init__(self, run: RecordedRun, cost: StepCost) -> None:
        self.run = run
        self.engine = SimulatedEngine(
            engine_spec(run), cost=cost, tokens=_token, listener=self._listen, tap=self._tap, fast=True
        )
        self.times: dict[int, Times] = {}
        self.arrivals_s: dict[int, tuple[float, bool]] = {}
        """By request: when, and whether the engine was idle."""
        self.step_ends_s: list[float] = []
        self.samples: list[Sample] = []
        self.all_ended = trio.Event()

    async def simulate(self) -> Simulated:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.engine.run)
            nursery.start_soon(self._sample)
            start_s = trio.current_time()
            for request_id, asked in enumerate(self.run.asked, 1):
                arrival_s = start_s + asked.arrival_time_ns / 1e9
                if arrival_s > trio.current_time():
                    await trio.sleep_until(arrival_s)
                now_s = trio.current_time()
                self.arrivals_s[request_id] = (now_s, self.engine.num_open == 0)
                sampling = SamplingParams(seed=0, max_tokens=asked.output_toks, ignore_eos=True)
                self.engine.add(
                    AddRequest(
                        request_id=request_id,
                        prompt_token_ids=asked.input_tok_ids,
                        sampling=sampling,
                        eos_token_ids=(),
                        arrival_time_s=now_s,
                        deadline_s=now_s + 1e6,
                    )
                )
            await self.all_ended.wait()
            nursery.cancel_scope.cancel()
        counters = self.engine.status().counters
        return Simulated(
            times=tuple(self.times[request_id] for request_id in sorted(self.times)),
            samples=tuple(self.samples),
            num_steps=counters.num_steps,
            num_preemptions=counters.num_preemptions,
            num_cached_tokens=counters.num_cached_tokens,
            num_prompt_tokens=counters.num_prompt_tokens,
        )

    def _tap(self, actor: Address, now_s: float, messages: Sequence[object], said: Sequence[Said]) -> None:  # noqa: ARG002
        if actor == "scheduler" and any(isinstance(message, StepDone) for message in messages):
            self.step_ends_s.append(now_s)

    def _listen(self, outputs: StepOutputs) -> None:
        for ended in outputs.ended:
            timing = ended.timing
            if (
                not isinstance(ended.outcome, Finished)
                or timing is None
                or timing.first_scheduled_s is None
                or timing.first_token_s is None
                or timing.last_token_s is None
            ):
                raise KsanaError(f"request {ended.request_id} ended in {ended.outcome}")
            arrival_s, was_idle = self.arrivals_s[ended.request_id]
            # The recorded engine looks at its queue when a step is done, or at once when it has none.
            queued_s = arrival_s
            if not was_idle:
                queued_s = self.step_ends_s[bisect_left(self.step_ends_s, arrival_s)]
            self.times[ended.request_id] = Times(
                arrival_s,
                queued_s,
                timing.first_scheduled_s,
                timing.first_token_s,
                timing.last_token_s,
                ended.usage.num_output_tokens,
            )
        if len(self.times) == len(self.run.asked):
            self.all_ended.set()

    async def _sample(self) -> None:
        while True:
            await trio.sleep(1.0)
            status = self.engine.status()
            use = status.fa_use
            taken = use.num_blocks - use.num_free - use.num_cached if use is not None else 0
            share = taken / use.num_blocks if use is not None else 0.0
            self.samples.append(
                Sample(trio.current_time(), status.num_running, status.num_waiting, 100 * share)
            )


def _token(request: KnownRequest, position: int) -> int:
    """Any token; the same one when the request is computed again."""
    return _FIRST_TOKEN + (request.request_id * 7919 + position * 104_729) % _NUM_TOKENS


def simulate(run: RecordedRun, cost: StepCost) -> Simulated:
    async def main() -> Simulated:
        return await _World(run, cost).simulate()

    try:
        return run_deterministic(0, main, VirtualClock())
    except BaseExceptionGroup as group:  # trio wraps what its tasks raise
        if isinstance(cause := expected_cause(group), KsanaError):
            raise cause from None
        raise


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
    """0: every judged figure is within its bound; 1: one is not; 2: a file is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--num-layers", type=int, default=32, help="decoder layers of the model (32)")
    parser.add_argument("--num-blocks", type=int, help="KV blocks of 16, where meta.json does not have them")
    parser.add_argument("--again", type=int, default=0, metavar="N", help="simulate N times more (0)")
    parser.add_argument("--unequal-kv", action="store_true", help="use skew.csv (docs/fidelity.md, 4)")
    options = parser.parse_args(arguments)
    try:
        run = read_run(options.directory)
        if options.num_blocks:
            kv_cache = KvCache(num_gpu_blocks=options.num_blocks)
            run = msgspec.structs.replace(run, meta=msgspec.structs.replace(run.meta, kv_cache=kv_cache))
        model = fit_profile(options.directory, num_layers=options.num_layers, unequal_kv=options.unequal_kv)
        cost = CostModel(model.data, allow_extrapolation=True)
        recorded = recorded_times(run)
        simulated = simulate(run, cost.step)
        again = [simulate(moved(run, seed), cost.step).times for seed in range(options.again)]
    except KsanaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    num_devices = run.meta.engine_kwargs.tensor_parallel_size
    if num_devices > 1:
        print(
            f"NOTE: the recorded engine ran on {num_devices} devices (tensor_parallel_size). What they tell "
            "each other is in no table and costs nothing here: expect too little."
        )
    print(
        f"{run.meta.model}, {len(run.asked)} requests, {options.num_layers} decoder layers (--num-layers); "
        f"simulated: {simulated.num_steps} steps, "
        f"{simulated.num_preemptions} preemptions, {simulated.num_cached_tokens} of "
        f"{simulated.num_prompt_tokens} prompt tokens cached; {cost.num_extrapolated} steps outside tables"
    )
    table = figures(recorded, simulated.times)
    print_figures(table)
    compare_samples(run.samples, simulated.samples)
    if again:
        print_spread([figures(recorded, times) for times in again])
    print("the tables' own errors on what was held out of them, percent:")
    for kind, held_out in model.errors.items():
        print(f"  {kind:55} mean {held_out.mean_abs_pct:6.2f}   most {held_out.max_abs_pct:6.2f}")
    return 0 if all(figure.is_within for figure in table) else 1


if __name__ == "__main__":
    sys.exit(main())
