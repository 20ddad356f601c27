"""A short rough run: many kinds of requests, impatient clients, crashes, a store that breaks, a shutdown."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import msgspec
import trio

from ksana.config import Settings
from ksana.costs.step_cost import LinearStepCost
from ksana.devices.simulated import SimulatedBackend
from ksana.devices.simulated_worker import KnownRequest, TokenSource, hashed_tokens
from ksana.engine import Engine
from ksana.errors import InvariantViolated
from ksana.messages.base import Message
from ksana.messages.blocks import PoolUse
from ksana.messages.remote import AllocateBlocksForRemoteCache, ConfirmRemoteCacheLoadingResult
from ksana.messages.status import EngineStatus
from ksana.messages.steps import StepPlan
from ksana.messages.stores import RemoteCacheStatus
from ksana.model_setup import ModelSetup
from ksana.runtime.actor import Address, Said
from ksana.runtime.deterministic import run_deterministic
from ksana.runtime.virtual_clock import VirtualClock
from ksana.stores.simulated import Faults, SimulatedStore
from simulations.clients import Ask, Doors, Tally, make_ask, open_loop, run_client
from simulations.device import simulated_device
from simulations.message_log import MessageLog
from simulations.toy_model import toy_model

_CRASHES_PER_STEP = 0.002
_BAD_ROWS = 0.0005
_LEAVES_PER_CALL = 0.03
_LEFT_AT_THE_END = 40


class SmokeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one run gave. `digest` is over every message of it, in order, with its time."""

    seed: int
    digest: str
    num_messages: int
    num_activations: int
    virtual_s: float
    messages: dict[str, int]
    endings: dict[str, int]
    num_preemptions: int
    num_worker_restarts: int
    num_hit_tokens: int
    num_swa_evictions: int
    num_remote_hit_tokens: int
    remote: RemoteCacheStatus


def run_smoke(seed: int, num_requests: int = 300, sliding_window: int | None = 96) -> SmokeReport:
    """Run it. Raises InvariantViolated, or an exception group with it, when a promise is broken."""

    async def main() -> SmokeReport:
        return await _Smoke(seed, num_requests, sliding_window).run()

    return run_deterministic(seed, main, VirtualClock())


class _Smoke:
    def __init__(self, seed: int, num_requests: int, sliding_window: int | None) -> None:
        self.seed = seed
        self.num_requests = num_requests
        self.rng = random.Random(seed)
        self.faults = random.Random(seed + 1)
        self.log = MessageLog()
        self.tally = Tally()
        self.doors: Doors = {}
        self.model = toy_model(sliding_window=sliding_window)
        (eos,) = self.model.tokenizer.eos_ids
        self.tokens = _with_bad_rows(hashed_tokens(self.model.spec.vocab_size, eos, mean_output_len=60))
        self.store = SimulatedStore(seed + 2, latency_s=0.003, bytes_per_s=2e6)
        self.stop_id = self.model.tokenizer.encode("q")[0]

    async def run(self) -> SmokeReport:
        settings = Settings(
            model="toy",
            kv_cache_memory="176KiB",
            max_model_len=1024,
            max_num_seqs=16,
            max_num_batched_tokens=128,
            max_queued_requests=100,
            drain_timeout=1,
            remote_cache_staging=32 << 10,
            max_remote_loads=6,
        )
        engine = Engine(
            settings,
            files=self.model,
            backend=self._backend,
            tap=self._tap,
            threads=False,
            store=self.store,
            check_messages=True,
        )
        async with trio.open_nursery() as clients, engine, trio.open_nursery() as weather:
            weather.start_soon(break_now_and_then, self.store, self.faults)

            def start(ask: Ask) -> None:
                clients.start_soon(
                    run_client,
                    ask,
                    engine.client.generate,
                    self.tokens,
                    lambda token_id: token_id == self.stop_id,
                    self.tally,
                    self.doors,
                )

            def make(rng: random.Random) -> Ask:
                return make_ask(rng, self.model.spec.vocab_size, max_tokens=120)

            await open_loop(self.rng, self.num_requests, 4.0, start, make)
            status = await self._settle(engine)
            # A last crowd, most of which the shutdown cuts short.
            await open_loop(self.rng, _LEFT_AT_THE_END, 100.0, start, make)
            weather.cancel_scope.cancel()
        if self.tally.num() != self.num_requests + _LEFT_AT_THE_END:
            raise InvariantViolated(
                f"{self.tally.num()} of {self.num_requests + _LEFT_AT_THE_END} requests ended"
            )
        return self._report(status)

    def _backend(self, setup: ModelSetup) -> SimulatedBackend:
        cost = LinearStepCost(fixed_s=0.01, per_token_s=2e-4, per_attended_token_s=1e-6)
        return simulated_device(setup, self.tokens, cost, self._fault)

    def _tap(self, actor: Address, now_s: float, messages: Sequence[Message], said: Sequence[Said]) -> None:
        """Logs, and has clients leave in the middle of a load."""
        self.log(actor, now_s, messages, said)
        for _, message in said:
            if not isinstance(message, AllocateBlocksForRemoteCache | ConfirmRemoteCacheLoadingResult):
                continue
            if self.faults.random() < _LEAVES_PER_CALL:
                self.doors[message.request_id]()

    def _fault(self, _number: int, _plan: StepPlan) -> str | None:
        return "planned crash" if self.faults.random() < _CRASHES_PER_STEP else None

    async def _settle(self, engine: Engine) -> EngineStatus:
        """Wait until nothing is left to do; then every block must be free or cache."""
        with trio.fail_after(100_000):
            while True:
                await trio.sleep(1)
                status = engine.status()
                if status.has_work or status.num_open_slots:
                    continue
                if _is_balanced(status.fa_use) and _is_balanced(status.swa_use):
                    return status

    def _report(self, status: EngineStatus) -> SmokeReport:
        assert status.remote is not None
        return SmokeReport(
            seed=self.seed,
            digest=self.log.hexdigest(),
            num_messages=self.log.num_messages,
            num_activations=self.log.num_activations,
            virtual_s=trio.current_time(),
            messages=_sorted(self.log.counts),
            endings=_sorted(self.tally.endings),
            num_preemptions=status.counters.num_preemptions,
            num_worker_restarts=status.num_worker_restarts,
            num_hit_tokens=status.cache.num_hit_tokens,
            num_swa_evictions=status.cache.num_swa_evictions,
            num_remote_hit_tokens=status.cache.num_remote_hit_tokens,
            remote=status.remote,
        )


async def break_now_and_then(store: SimulatedStore, rng: random.Random) -> None:
    """Good times and bad ones in turn, until cancelled."""
    while True:
        await trio.sleep(rng.expovariate(1 / 10))
        kind = rng.choice(("down", "frozen", "slow", "losing", "damaging"))
        if kind == "frozen":
            store.freeze()
        elif kind == "losing":
            store.faults.missing_share = store.faults.vanishing_share = rng.random() / 2
        elif kind == "damaging":
            store.faults.corrupt_share = store.faults.truncated_share = rng.random() / 2
        else:
            store.faults.down = kind == "down"
            store.faults.slowdown = 100.0 if kind == "slow" else 1.0
        await trio.sleep(rng.expovariate(1 / 4))
        store.thaw()
        store.faults = Faults()


def _with_bad_rows(tokens: TokenSource) -> TokenSource:
    """The same tokens, but now and then a row of its own fails."""

    def token(request: KnownRequest, position: int) -> int | str:
        if random.Random(request.sampling.seed * 1000 + position).random() < _BAD_ROWS:
            return "NaN in the logits"
        return tokens(request, position)

    return token


def _is_balanced(use: PoolUse | None) -> bool:
    return use is None or use.num_free + use.num_cached == use.num_blocks


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items()))
