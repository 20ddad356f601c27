"""What share of prompt tokens the prefix cache saves, for a workload, an eviction rule and pool sizes.

The whole engine runs: real scheduler, block allocator and SWA cache manager on the virtual clock; the
simulated device checks the content of every block that is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import trio

from ksana.config import Settings, settings_from
from ksana.costs.step_cost import LinearStepCost
from ksana.devices.simulated import SimulatedBackend
from ksana.devices.simulated_worker import TokenSource, hashed_tokens
from ksana.engine import Engine
from ksana.errors import InvariantViolated
from ksana.messages.outputs import Ended, Finished, TextDelta
from ksana.messages.requests import SamplingParams, TokensPrompt
from ksana.model_setup import ModelFiles, ModelSetup
from ksana.runtime.actor import Tap
from ksana.runtime.deterministic import run_deterministic
from ksana.runtime.virtual_clock import VirtualClock
from simulations.device import simulated_device
from simulations.toy_model import toy_model
from simulations.traces import Conversation, TraceRequest

FIRST_TOKEN = 3
"""Lower ids of the toy model are special tokens."""


class HitRates(msgspec.Struct, frozen=True, kw_only=True):
    """`hit_rate`: share of looked-up prompt tokens that needed no computing; `fa_hit_rate`: the same before
    the sliding window cut the prefix short."""

    num_requests: int
    num_fa_blocks: int
    num_swa_blocks: int
    hit_rate: float
    fa_hit_rate: float
    num_fa_evictions: int
    num_swa_evictions: int
    num_preemptions: int
    mean_ttft_s: float
    num_messages: int


class _Counter:
    def __init__(self, tap: Tap | None) -> None:
        self.num_messages = 0
        self._tap = tap

    def __call__(self, actor: Any, now_s: float, messages: Any, said: Any) -> None:
        self.num_messages += len(messages)
        if self._tap is not None:
            self._tap(actor, now_s, messages, said)


class Replay:
    """One engine and those who ask it. Raises InvariantViolated when a request does not finish."""

    def __init__(
        self, model: ModelFiles, settings: Settings, tap: Tap | None = None, check_messages: bool = False
    ) -> None:
        self.model = model
        self.tokens: TokenSource = hashed_tokens(model.spec.vocab_size)
        self.counter = _Counter(tap)
        self.engine = Engine(
            settings,
            files=model,
            backend=self._backend,
            tap=self.counter,
            threads=False,
            check_messages=check_messages,
        )
        self.ttfts_s: list[float] = []

    def _backend(self, setup: ModelSetup) -> SimulatedBackend:
        cost = LinearStepCost(fixed_s=0.005, per_token_s=2e-5, per_attended_token_s=1e-8)
        return simulated_device(setup, self.tokens, cost)

    async def ask(self, token_ids: tuple[int, ...], max_tokens: int) -> list[int]:
        """The answer's ids."""
        sampling = SamplingParams(seed=0, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        answer: list[int] = []
        asked_s = trio.current_time()
        async for event in self.engine.generate(TokensPrompt(token_ids=token_ids), sampling):
            if isinstance(event, TextDelta):
                if not answer:
                    self.ttfts_s.append(trio.current_time() - asked_s)
                answer += event.token_ids
            elif isinstance(event, Ended) and not isinstance(event.outcome, Finished):
                raise InvariantViolated(f"request {event.request_id} ended in {event.outcome}")
        return answer

    async def converse(self, conversation: Conversation) -> None:
        await trio.sleep_until(conversation.start_s)
        history = conversation.system
        for turn in conversation.turns:
            await trio.sleep(turn.think_s)
            history += turn.user
            history += tuple(await self.ask(history, turn.max_tokens))

    async def follow(self, trace: Iterable[TraceRequest]) -> None:
        async with trio.open_nursery() as nursery:
            for request in trace:
                await trio.sleep_until(request.arrival_s)
                nursery.start_soon(self.ask, request.token_ids, request.max_tokens)

    def report(self) -> HitRates:
        status = self.engine.status()
        assert status.fa_use is not None
        cache = status.cache
        queried = max(1, cache.num_queried_tokens)
        return HitRates(
            num_requests=status.counters.num_finished,
            num_fa_blocks=status.fa_use.num_blocks,
            num_swa_blocks=status.swa_use.num_blocks if status.swa_use is not None else 0,
            hit_rate=cache.num_hit_tokens / queried,
            fa_hit_rate=cache.num_fa_hit_tokens / queried,
            num_fa_evictions=cache.num_fa_evictions,
            num_swa_evictions=cache.num_swa_evictions,
            num_preemptions=status.counters.num_preemptions,
            mean_ttft_s=sum(self.ttfts_s) / max(1, len(self.ttfts_s)),
            num_messages=self.counter.num_messages,
        )


def pool_bytes(model: ModelFiles, num_tokens: float) -> str:
    """Memory that holds so many tokens in all layers, as `--kv-cache-memory` wants it."""
    per_token = model.spec.kv_bytes_per_token("full", 4) + model.spec.kv_bytes_per_token("sliding", 4)
    return f"{round(num_tokens * per_token)}B"


def run_replay(
    work: Callable[[Replay], Any],
    *,
    model: ModelFiles | None = None,
    pool_tokens: float,
    seed: int = 0,
    tap: Tap | None = None,
    check_messages: bool = False,
    **settings: Any,
) -> HitRates:
    """Run `await work(replay)` in a world of its own and report. Further settings go to the engine.

    `check_messages`: the cache's invariants are checked after every message.
    """
    files = model or toy_model()
    defaults: dict[str, Any] = {
        "model": "toy",
        "kv_cache_memory": pool_bytes(files, pool_tokens),
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "max_queued_requests": 100_000,
        "request_timeout": 1_000_000,
        "stall_timeout": 100_000,
    }

    async def main() -> HitRates:
        replay = Replay(files, settings_from(defaults | settings), tap, check_messages)
        async with replay.engine:
            await work(replay)
            return replay.report()

    return run_deterministic(seed, main, VirtualClock())


async def all_conversations(replay: Replay, conversations: list[Conversation]) -> None:
    async with trio.open_nursery() as nursery:
        for conversation in conversations:
            nursery.start_soon(replay.converse, conversation)
