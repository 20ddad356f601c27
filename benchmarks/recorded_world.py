"""A recorded run's workload on simulated engines, set up as the recorded ones were."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec
import trio

from benchmarks.recorded_run import RecordedRun, Sample
from benchmarks.serving_figures import Times
from ksana.cli.main import expected_cause
from ksana.costs.step_cost import StepCost
from ksana.devices.simulated_worker import KnownRequest
from ksana.errors import ConfigError, KsanaError
from ksana.messages.outputs import Finished, StepOutputs
from ksana.messages.requests import AddRequest, SamplingParams
from ksana.messages.steps import StepDone
from ksana.runtime.actor import Address, Said
from ksana.runtime.deterministic import run_deterministic
from ksana.runtime.virtual_clock import VirtualClock
from simulations.engine import EngineSpec, SimulatedEngine

_FIRST_TOKEN, _NUM_TOKENS = 1000, 100_000
_WAITING_COUNTS = 4
"""Data parallel engines get the request whose number of running ones and four times the waiting is least, as
vLLM's clients choose."""


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    times: tuple[Times, ...]
    samples: tuple[Sample, ...]
    num_steps: int
    num_preemptions: int
    num_cached_tokens: int
    num_prompt_tokens: int


def engine_spec(run: RecordedRun) -> EngineSpec:
    """One simulated engine, set up as the recorded one was. That one keeps block 0 for padding."""
    meta = run.meta
    num_blocks = None if meta.kv_cache is None else meta.kv_cache.num_gpu_blocks
    if meta.kv_cache is None or num_blocks is None:
        raise ConfigError("meta.json does not tell how many KV blocks the engine had; give --num-blocks")
    if meta.engine_kwargs.pipeline_parallel_size > 1:
        raise ConfigError(
            f"the recorded engine ran its layers in {meta.engine_kwargs.pipeline_parallel_size} stages "
            "(pipeline_parallel_size), which is not simulated"
        )
    scheduler = meta.resolved_config.scheduler_config
    longest = max(len(asked.input_tok_ids) + asked.output_toks for asked in run.asked)
    return EngineSpec(
        block_size=meta.kv_cache.block_size,
        num_fa_blocks=num_blocks - 1,
        max_num_seqs=meta.engine_kwargs.max_num_seqs,
        max_num_batched_tokens=meta.engine_kwargs.max_num_batched_tokens,
        max_model_len=meta.max_model_len or longest + 1,
        admission="whole_prompt" if scheduler.scheduler_reserve_full_isl else "first_chunk",
        hold_when_short=True,
        plan_ahead=scheduler.async_scheduling,
        enable_prefix_caching=meta.kv_cache.enable_prefix_caching,
        start_time_s=0.0,
    )


class _Engine:
    """One of the engines, and when its steps ended."""

    def __init__(self, world: _World, spec: EngineSpec, cost: StepCost) -> None:
        self.engine = SimulatedEngine(
            spec, cost=cost, tokens=_token, listener=world.listen, tap=self._tap, fast=True
        )
        self.step_ends_s: list[float] = []

    def _tap(self, actor: Address, now_s: float, messages: Sequence[object], said: Sequence[Said]) -> None:  # noqa: ARG002
        if actor == "scheduler" and any(isinstance(message, StepDone) for message in messages):
            self.step_ends_s.append(now_s)

    @property
    def load(self) -> int:
        status = self.engine.status()
        # What was handed over at this very moment is in neither number yet.
        waiting = max(status.num_waiting, self.engine.num_open - status.num_running)
        return _WAITING_COUNTS * waiting + status.num_running


class _World:
    """The engines and the clients of the workload, who ask when they did."""

    def __init__(self, run: RecordedRun, cost: StepCost) -> None:
        self.run = run
        spec = engine_spec(run)
        self.engines = [_Engine(self, spec, cost) for _ in range(run.meta.engine_kwargs.data_parallel_size)]
        self.times: dict[int, Times] = {}
        self.arrivals_s: dict[int, tuple[float, bool, _Engine]] = {}
        """By request: when, whether the engine was idle, and which one it is."""
        self.samples: list[Sample] = []
        self.all_ended = trio.Event()

    async def simulate(self) -> Simulated:
        async with trio.open_nursery() as nursery:
            for one in self.engines:
                nursery.start_soon(one.engine.run)
            nursery.start_soon(self._sample)
            start_s = trio.current_time()
            for request_id, asked in enumerate(self.run.asked, 1):
                arrival_s = start_s + asked.arrival_time_ns / 1e9
                if arrival_s > trio.current_time():
                    await trio.sleep_until(arrival_s)
                now_s = trio.current_time()
                chosen = min(self.engines, key=lambda one: one.load)
                self.arrivals_s[request_id] = (now_s, chosen.engine.num_open == 0, chosen)
                sampling = SamplingParams(seed=0, max_tokens=asked.output_toks, ignore_eos=True)
                chosen.engine.add(
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
        counters = [one.engine.status().counters for one in self.engines]
        return Simulated(
            times=tuple(self.times[request_id] for request_id in sorted(self.times)),
            samples=tuple(self.samples),
            num_steps=sum(one.num_steps for one in counters),
            num_preemptions=sum(one.num_preemptions for one in counters),
            num_cached_tokens=sum(one.num_cached_tokens for one in counters),
            num_prompt_tokens=sum(one.num_prompt_tokens for one in counters),
        )

    def listen(self, outputs: StepOutputs) -> None:
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
            arrival_s, was_idle, one = self.arrivals_s[ended.request_id]
            # The recorded engine looks at its queue when a step is done, or at once when it has none.
            queued_s = arrival_s
            if not was_idle:
                queued_s = one.step_ends_s[bisect_left(one.step_ends_s, arrival_s)]
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
            running = waiting = taken = num_blocks = 0
            for one in self.engines:
                status = one.engine.status()
                running += status.num_running
                waiting += status.num_waiting
                if (use := status.fa_use) is not None:
                    taken += use.num_blocks - use.num_free - use.num_cached
                    num_blocks += use.num_blocks
            share = taken / num_blocks if num_blocks else 0.0
            self.samples.append(Sample(trio.current_time(), running, waiting, 100 * share))


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
