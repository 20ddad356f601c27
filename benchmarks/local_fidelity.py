"""Does the simulator say what this machine then does? Serve requests for real, and simulate the same.

    ksana perf smollm2-135m --sweep --cost-file cost.json
    python -m benchmarks.local_fidelity --cost cost.json [--rates 1.5 3] [--requests 200]

Requests come at random times (a Poisson process) with prompts and answers of random lengths, at two loads.
Each load is simulated once (the same scheduler, block allocator and settings on a virtual clock, steps as
long as the cost model says), then served twice by a real engine with its worker process, with other prompts
of the same lengths. Nothing is fitted to the runs compared here. Times are the scheduler's own in all three:
arrival, first token, last token. The spread of the two real runs is printed beside the error, because nothing
can be predicted better than the machine repeats itself.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec
import trio

from ksana.config import Settings
from ksana.costs.cost_file import CostModel, load_cost
from ksana.devices.simulated_worker import KnownRequest
from ksana.engine import Engine
from ksana.messages.base import Message
from ksana.messages.outputs import Ended, Finished, RequestEnded, StepOutputs
from ksana.messages.requests import AddRequest, SamplingParams, TokensPrompt
from ksana.model_setup import ModelSetup, find_model, set_up
from ksana.runtime.actor import Address, Said
from ksana.runtime.deterministic import run_deterministic
from ksana.runtime.virtual_clock import VirtualClock
from simulations.engine import EngineSpec, SimulatedEngine

PROMPT_LEN, OUTPUT_LEN = (16, 192), (8, 48)


class Ask(msgspec.Struct, frozen=True):
    at_s: float
    token_ids: tuple[int, ...]
    num_output_tokens: int

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(seed=0, temperature=0.0, max_tokens=self.num_output_tokens, ignore_eos=True)


def make_asks(rate_per_s: float, num_requests: int, vocab_size: int, content_seed: int) -> list[Ask]:
    """The same times and lengths for equal rates; other prompts for other content seeds."""
    shape, content = random.Random(f"shape {rate_per_s}"), random.Random(content_seed)
    at_s = 0.0
    asks = []
    for _ in range(num_requests):
        at_s += shape.expovariate(rate_per_s)
        prompt = tuple(content.choices(range(100, vocab_size), k=shape.randint(*PROMPT_LEN)))
        asks.append(Ask(at_s, prompt, shape.randint(*OUTPUT_LEN)))
    return asks


class Times:
    """TTFT and TPOT of the requests of one run, as the scheduler saw them."""

    def __init__(self) -> None:
        self.ttft_s: list[float] = []
        self.tpot_s: list[float] = []

    def tap(self, actor: Address, _now_s: float, _in: Sequence[Message], said: Sequence[Said]) -> None:
        if actor == "scheduler":
            for _, message in said:
                if isinstance(message, StepOutputs):
                    self.listen(message)

    def listen(self, outputs: StepOutputs) -> None:
        for ended in outputs.ended:
            self._take(ended)

    def _take(self, ended: RequestEnded) -> None:
        timing = ended.timing
        assert isinstance(ended.outcome, Finished), ended
        assert timing is not None
        assert timing.first_token_s is not None
        assert timing.last_token_s is not None
        self.ttft_s.append(timing.first_token_s - timing.arrival_s)
        self.tpot_s.append((timing.last_token_s - timing.first_token_s) / (ended.usage.num_output_tokens - 1))

    def means_ms(self) -> tuple[float, float]:
        return statistics.mean(self.ttft_s) * 1e3, statistics.mean(self.tpot_s) * 1e3


class RealEngine:
    """One real engine for all runs, as a server is started once."""

    def __init__(self, settings: Settings) -> None:
        self.times = Times()
        self.engine = Engine(settings, tap=lambda *what: self.times.tap(*what))

    async def run(self, asks: list[Ask]) -> Times:
        self.times = Times()
        began_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            for ask in asks:
                await trio.sleep_until(began_s + ask.at_s)
                nursery.start_soon(self._one, ask)
        assert len(self.times.ttft_s) == len(asks)
        return self.times

    async def _one(self, ask: Ask) -> None:
        async for event in self.engine.generate(TokensPrompt(token_ids=ask.token_ids), ask.sampling):
            if isinstance(event, Ended):
                assert isinstance(event.outcome, Finished), event


def simulate(setup: ModelSetup, cost: CostModel, asks: list[Ask]) -> Times:
    """The same requests on a simulated engine of the same limits and pools."""
    spec = EngineSpec(
        block_size=setup.pools.block_size,
        num_fa_blocks=setup.pools.num_fa_blocks,
        max_num_seqs=setup.settings.max_num_seqs,
        max_num_batched_tokens=setup.settings.max_num_batched_tokens,
        max_model_len=setup.max_model_len,
        plan_ahead=setup.plan_ahead,
        enable_prefix_caching=setup.settings.enable_prefix_caching,
        start_time_s=0.0,
    )
    times = Times()

    async def main() -> None:
        all_ended = trio.Event()

        def listen(outputs: StepOutputs) -> None:
            times.listen(outputs)
            if len(times.ttft_s) == len(asks):
                all_ended.set()

        engine = SimulatedEngine(
            spec, cost=cost.step, tokens=_some_token, listener=listen, host_s=cost.host_s
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.run)
            began_s = trio.current_time()
            for number, ask in enumerate(asks):
                await trio.sleep_until(began_s + ask.at_s)
                engine.add(_add_request(number + 1, ask))
            await all_ended.wait()
            nursery.cancel_scope.cancel()

    run_deterministic(0, main, VirtualClock())
    return times


def _some_token(_request: KnownRequest, position: int) -> int:
    return 100 + position % 1000


def _add_request(request_id: int, ask: Ask) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=ask.token_ids,
        sampling=ask.sampling,
        eos_token_ids=(),
        arrival_time_s=trio.current_time(),
        deadline_s=trio.current_time() + 1e6,
    )


async def serve(settings: Settings, rates: list[float], num_requests: int) -> dict[float, list[Times]]:
    """Two runs for each rate, in turns, so that a slow hour of the machine hits all."""
    real = RealEngine(settings)
    runs: dict[float, list[Times]] = {rate: [] for rate in rates}
    async with real.engine:
        vocab_size = real.engine.setup.files.spec.vocab_size
        await real.run(make_asks(20.0, 8, vocab_size, content_seed=0))  # to warm up
        for content_seed in (2, 3):
            for rate in rates:
                runs[rate].append(await real.run(make_asks(rate, num_requests, vocab_size, content_seed)))
    return runs


def print_table(predicted: dict[float, Times], runs: dict[float, list[Times]]) -> None:
    print(f"{'req/s':>6} {'':10} {'real':>9} {'again':>9} {'spread':>8} {'simulated':>10} {'error':>8}")
    for rate, (first, second) in runs.items():
        of_all = zip(first.means_ms(), second.means_ms(), predicted[rate].means_ms(), strict=True)
        for name, (once, again, ours) in zip(("TTFT, ms", "TPOT, ms"), of_all, strict=True):
            mean = (once + again) / 2
            print(
                f"{rate:6.2f} {name:10} {once:9.2f} {again:9.2f} {abs(once - again) / mean:8.1%} "
                f"{ours:10.2f} {ours / mean - 1:+8.1%}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cost", required=True, type=Path, help="cost model of this model on this machine")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.5, 3.0], help="requests per second")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    settings = Settings(
        model=options.model,
        max_num_seqs=options.max_num_seqs,
        num_threads=options.threads,
        kv_cache_memory="1GiB",
    )
    cost = load_cost(options.cost)
    setup = set_up(settings, find_model(settings, print))
    vocab_size = setup.files.spec.vocab_size
    print(f"{options.requests} requests per run; cost model: {cost.source}")
    predicted = {
        rate: simulate(setup, cost, make_asks(rate, options.requests, vocab_size, content_seed=1))
        for rate in options.rates
    }
    print_table(predicted, trio.run(serve, settings, options.rates, options.requests))


if __name__ == "__main__":
    main()
