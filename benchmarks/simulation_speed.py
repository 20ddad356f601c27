"""How fast a simulation runs on one core: scheduled steps per second, and a recorded hour of chats.

    python -m benchmarks.simulation_speed [--steps 2000] [--mooncake mooncake_conversation.jsonl]

Real scheduler, block allocator and (with a window) SWA cache manager, planning ahead, on the fast device,
without checks and journal. The shares are from a second run in which the parts are timed. A simulation uses
one core and waits for nothing: wall and CPU time differ by what else the machine does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import trio

from ksana.costs.step_cost import LinearStepCost
from ksana.devices.simulated_worker import KnownRequest
from ksana.messages.outputs import StepOutputs
from ksana.messages.requests import AddRequest, SamplingParams
from ksana.runtime.deterministic import run_deterministic
from ksana.runtime.virtual_clock import VirtualClock
from simulations.engine import EngineSpec, SimulatedEngine
from simulations.keep import Keep
from simulations.reports.metrics import RunRecord
from simulations.requests import OpenLoop
from simulations.scenario import WorldSpec
from simulations.workloads.mooncake import read_mooncake
from simulations.world import run_world

BATCHES = (1, 8, 32, 64)
PROMPT_TOKENS = 512
WINDOW = 1024
PARTS = ("scheduler", "block allocator", "SWA manager", "device", "rest")

SERVER = "a 70B model in 16 bit, 320 KiB of KV per token, on eight 80 GB GPUs"
SERVER_COST = LinearStepCost(fixed_s=0.02, per_token_s=6e-5, per_attended_token_s=2e-8)
"""Reading 140 GB of weights at some 19 TB/s takes 7 ms; 160 all-reduces and what the host does take the rest
of 20. A token is 140 GFLOP at about 2.3 PFLOP/s; its context is read at some 16 TB/s."""
SERVER_SPEC = EngineSpec(
    block_size=512,
    num_fa_blocks=2500,
    max_num_seqs=128,
    max_num_batched_tokens=2048,
    max_model_len=1 << 17,
)
"""What 640 GB leave for KV are 1.28 million tokens."""


class Decodes:
    """One engine, so many requests at once, each until `num_steps` tokens are made."""

    def __init__(self, batch: int, num_steps: int, window: int | None, *, timed: bool = False) -> None:
        self.batch = batch
        self.num_steps = num_steps
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._num_left = batch
        self._began: trio.Event
        self._over: trio.Event
        self._timed = timed
        num_blocks = batch * ((PROMPT_TOKENS + num_steps) // 16 + 2)
        self.spec = EngineSpec(
            block_size=16,
            num_fa_blocks=num_blocks,
            num_swa_blocks=num_blocks if window is not None else 0,
            sliding_window=window,
            max_num_seqs=batch,
            max_num_batched_tokens=PROMPT_TOKENS * batch,
            max_model_len=1 << 16,
        )

    def run(self) -> tuple[float, float]:
        """Steps per second of wall time and of CPU time, decoding alone: from the first tokens to the last
        ending."""
        return run_deterministic(1, self._main, VirtualClock())

    async def _main(self) -> tuple[float, float]:
        self._began, self._over = trio.Event(), trio.Event()
        engine = SimulatedEngine(
            self.spec, cost=LinearStepCost(), tokens=_next_token, listener=self._take, fast=True
        )
        if self._timed:
            self._time_parts(engine)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.run)
            for request_id in range(1, self.batch + 1):
                engine.add(_request(request_id, self.num_steps))
            await self._began.wait()
            first, began_s, began_cpu_s = (
                engine.status().last_step_id,
                time.perf_counter(),
                time.process_time(),
            )
            self.seconds = dict.fromkeys(PARTS, 0.0)
            await self._over.wait()
            seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
            num_steps = engine.status().last_step_id - first
            nursery.cancel_scope.cancel()
        self.seconds["rest"] = seconds - sum(self.seconds.values())
        return num_steps / seconds, num_steps / cpu_s

    def _take(self, outputs: StepOutputs) -> None:
        self._began.set()
        self._num_left -= len(outputs.ended)
        if not self._num_left:
            self._over.set()

    def _time_parts(self, engine: SimulatedEngine) -> None:
        cores = engine.cores
        parts: list[tuple[str, Any, str]] = [
            ("scheduler", cores.scheduler, "handle"),
            ("block allocator", cores.allocator, "handle"),
            ("device", engine.backend, "begin"),
            ("device", engine.backend, "finish"),
        ]
        if cores.manager is not None:
            parts.append(("SWA manager", cores.manager, "handle"))
        for part, owner, method in parts:
            setattr(owner, method, self._timing(part, getattr(owner, method)))

    def _timing(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            began_s = time.perf_counter()
            result = function(*args, **named)
            self.seconds[part] += time.perf_counter() - began_s
            return result

        return timed


def _next_token(_request: KnownRequest, position: int) -> int:
    return 3 + position % 250


def _request(request_id: int, num_steps: int) -> AddRequest:
    first = 1000 * request_id
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=tuple(range(first, first + PROMPT_TOKENS)),
        sampling=SamplingParams(seed=request_id, max_tokens=num_steps),
        eos_token_ids=(),
        arrival_time_s=0.0,
        deadline_s=1e9,
    )


def print_steps(num_steps: int) -> None:
    print(f"decode steps per second, block 16, prompts of {PROMPT_TOKENS} tokens; shares of the time")
    print(
        f"{'window':>7} {'batch':>6} {'steps/s':>9} {'/CPU s':>9} "
        + " ".join(f"{part:>15}" for part in PARTS)
    )
    for window in (None, WINDOW):
        for batch in BATCHES:
            speed, of_cpu = max(Decodes(batch, num_steps, window).run() for _ in range(2))
            decodes = Decodes(batch, num_steps, window, timed=True)
            decodes.run()
            total = sum(decodes.seconds.values())
            shares = " ".join(f"{decodes.seconds[part] / total:15.0%}" for part in PARTS)
            print(f"{window or '-':>7} {batch:>6} {speed:9,.0f} {of_cpu:9,.0f} {shares}", flush=True)


def print_mooncake(path: Path, replicas: int, limit: int | None) -> None:
    spec = WorldSpec(engines=(SERVER_SPEC,), replicas=replicas, routing="prefix_affinity", cost=SERVER_COST)
    workload = OpenLoop(islice(read_mooncake(path), limit))
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    record = run_world(spec, workload, seed=1, keep=Keep(check_answers=False), title=path.name)
    _print_record(record, time.perf_counter() - began_s, time.process_time() - began_cpu_s)


def _print_record(record: RunRecord, seconds: float, cpu_s: float) -> None:
    finished = [request for request in record.requests if request.is_finished]
    counters = [engine.counters for engine in record.engines]

    def total(name: str) -> int:
        return sum(counter[name] for counter in counters)

    ttfts = [r.first_token_s - r.arrival_s for r in finished if r.first_token_s is not None]
    tpots = [
        (r.last_token_s - r.first_token_s) / (r.num_output_tokens - 1)
        for r in finished
        if r.first_token_s is not None and r.last_token_s is not None and r.num_output_tokens > 1
    ]
    num_steps = total("num_steps")
    print(f"\n{record.title} on {len(record.engines)} replicas of {SERVER}")
    print(
        f"  {len(finished):,} of {len(record.requests):,} requests finished, "
        f"{sum(r.num_prompt_tokens for r in record.requests):,} prompt tokens, "
        f"{total('num_generated_tokens'):,} output tokens, {record.virtual_s:,.0f} s of their time"
    )
    print(
        f"  {num_steps:,} steps of {total('num_generated_tokens') / num_steps:.1f} rows; hit rate "
        f"{total('num_hit_tokens') / total('num_queried_tokens'):.3f}; mean TTFT "
        f"{sum(ttfts) / len(ttfts):.2f} s, mean TPOT {1e3 * sum(tpots) / len(tpots):.1f} ms"
    )
    print(
        f"  {seconds:.1f} s of wall time, {cpu_s:.1f} s of CPU: {num_steps / seconds:,.0f} steps per second"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation_speed", description=__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="tokens that each request makes")
    parser.add_argument("--mooncake", type=Path, help="a Mooncake trace (JSON lines)")
    parser.add_argument("--replicas", type=int, default=8, help="engines that the trace is spread over")
    parser.add_argument("--limit", type=int, help="only so many requests of the trace")
    options = parser.parse_args()
    if options.steps:
        print_steps(options.steps)
    if options.mooncake is not None:
        print_mooncake(options.mooncake, options.replicas, options.limit)


if __name__ == "__main__":
    main()
