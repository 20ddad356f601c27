"""A random small scenario per seed: settings, requests and faults, rough on purpose.

Pools are tiny, so that evictions, preemptions and refusals are the rule; texts are few, so that prefixes are
shared, forked and met again; and one seed in four has room for everything, so that nothing may go wrong.
"""

from __future__ import annotations

import random
from typing import get_args

import msgspec

from ksana.cache.cache_config import SwaEviction
from ksana.costs.step_cost import LinearStepCost
from simulations.engine import EngineSpec
from simulations.faults import (
    BadRow,
    Disconnects,
    Drained,
    Fault,
    Overload,
    Poison,
    SlowActor,
    SlowMessages,
    SlowWorker,
    StartFailures,
    StoreFaultKind,
    StoreTrouble,
    WorkerCrash,
)
from simulations.requests import ListedText, NamedText, PromptSource, SimRequest
from simulations.routing import Routing
from simulations.scenario import Scenario, StoreSpec, WorldSpec, least_swa_blocks
from simulations.script import STOP_TOKEN_ID, Script

_SALTS = ("", "", "", "", "tenant")


def draw_scenario(seed: int) -> Scenario:
    """The scenario of a seed; equal seeds, equal scenarios."""
    return _Drawing(random.Random(seed * 2 + 1)).scenario(seed)


class _Drawing:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.is_calm = rng.random() < 0.25
        """Room for everything, and no faults."""

    def scenario(self, seed: int) -> Scenario:
        rng = self.rng
        has_store = not self.is_calm and rng.random() < 0.4
        engine = self._engine(has_store)
        num_engines = 2 if rng.random() < (0.6 if has_store else 0.1) else 1
        requests = self._requests(engine)
        if self.is_calm:
            engine = _roomy(engine, requests)
        world = WorldSpec(
            engines=(engine,),
            replicas=num_engines,
            routing=rng.choice(get_args(Routing)),
            cost=LinearStepCost(
                fixed_s=0.01, per_token_s=rng.choice((0.0, 1e-4, 1e-3)), per_attended_token_s=1e-6
            ),
            store=StoreSpec(latency_s=0.003, bytes_per_s=rng.choice((1e5, 2e6))) if has_store else None,
            faults=() if self.is_calm else self._faults(requests, num_engines, has_store),
            fidelity="checked",
            sample_every_s=0.0,
            until_s=1e5 + 1e4,
        )
        return Scenario(title=f"swarm seed {seed}", world=world, seed=seed, requests=requests)

    def _engine(self, has_store: bool) -> EngineSpec:
        rng = self.rng
        block_size = rng.choice((1, 2, 3, 4, 4, 5, 8, 8, 16))
        max_model_len = rng.randint(3 * block_size, 24 * block_size) + 8
        engine = EngineSpec(
            block_size=block_size,
            num_fa_blocks=max_model_len // block_size + 1 + rng.choice((0, 1, 2, 4, 8, 16, 40)),
            sliding_window=rng.randint(1, 5 * block_size) if rng.random() < 0.6 else None,
            max_num_seqs=rng.randint(1, 8),
            max_num_batched_tokens=rng.choice((3, 5, 8, 16, 32, 64)),
            max_model_len=max_model_len,
            max_queued_requests=rng.choice((2, 100, 100, 100)),
            plan_ahead=rng.random() < 0.7,
            enable_prefix_caching=has_store or rng.random() < 0.9,
            window_open_at_start=rng.random() < 0.7,
            swa_eviction=rng.choice(get_args(SwaEviction)),
            max_remote_loads=rng.randint(1, 4),
            remote_load_timeout_s=rng.choice((0.1, 1.0, 5.0)),
            remote_write_back=rng.random() < 0.85,
            num_staging_slots=rng.choice((4, 8, 32)),
            start_time_s=rng.choice((0.05, 0.5)),
            step_timeout_s=20.0,
        )
        if engine.sliding_window is None:
            return engine
        spare = rng.choice((0, 1, 2, 5, 12, 30))
        return msgspec.structs.replace(engine, num_swa_blocks=least_swa_blocks(engine) + spare)

    # Requests

    def _requests(self, engine: EngineSpec) -> tuple[SimRequest, ...]:
        rng = self.rng
        pause_s = rng.choice((0.0, 0.02, 0.1, 0.5))
        shared = [NamedText(n, rng.randint(1, max(1, engine.max_model_len * 2 // 3))) for n in range(3)]
        requests: list[SimRequest] = []
        arrival_s = 0.0
        for number in range(rng.choice((rng.randint(2, 8), rng.randint(8, 20), rng.randint(20, 40)))):
            arrival_s += rng.expovariate(1 / pause_s) if pause_s else 0.0
            if rng.random() < 0.1:
                arrival_s += 3.0
            prompt = self._prompt(number, shared, requests)
            requests.append(self._request(arrival_s, prompt, engine))
        return tuple(requests)

    def _prompt(self, number: int, shared: list[NamedText], before: list[SimRequest]) -> PromptSource:
        rng = self.rng
        kind = rng.random()
        if kind < 0.15 and before:
            return rng.choice(before).prompt
        if kind < 0.4 and before:
            last = rng.choice(before)
            answer = Script(last, last.prompt.token_ids(), keep_prompt=False).tokens(0, last.max_tokens)
            said = ListedText(answer[: rng.randint(1, len(answer))])
            return last.prompt.then(said, NamedText(100 + number, rng.randint(1, 12)))
        own = NamedText(100 + number, rng.randint(1, 40))
        if kind < 0.75:
            return PromptSource((rng.choice(shared), own))
        return PromptSource((own,))

    def _request(self, arrival_s: float, prompt: PromptSource, engine: EngineSpec) -> SimRequest:
        rng = self.rng
        room = engine.max_model_len - 1
        if prompt.num_tokens > room and rng.random() < 0.9:
            prompt = PromptSource((ListedText(prompt.token_ids()[: rng.randint(1, room)]),))
        max_tokens = rng.randint(1, min(40, max(1, engine.max_model_len - prompt.num_tokens)))
        return SimRequest(
            arrival_s=arrival_s,
            prompt=prompt,
            num_output_tokens=rng.randint(1, 40) if rng.random() < 0.5 else None,
            max_tokens=max_tokens,
            min_tokens=rng.randint(1, max_tokens) if rng.random() < 0.2 else 0,
            ignore_eos=rng.random() < 0.1,
            stop_token_id=STOP_TOKEN_ID if rng.random() < 0.15 else None,
            seed=rng.randrange(4),
            cache_salt=rng.choice(_SALTS),
            timeout_s=rng.choice((0.05, 0.3)) if not self.is_calm and rng.random() < 0.08 else 1e6,
            leaves_after=rng.randint(0, 6) if rng.random() < 0.12 else None,
            stop_after=rng.randint(0, 8) if rng.random() < 0.12 else None,
        )

    # Faults

    def _faults(
        self, requests: tuple[SimRequest, ...], num_engines: int, has_store: bool
    ) -> tuple[Fault, ...]:
        rng = self.rng
        if rng.random() < 0.25:
            return ()
        return tuple(self._fault(requests, num_engines, has_store) for _ in range(rng.randint(1, 4)))

    def _fault(self, requests: tuple[SimRequest, ...], num_engines: int, has_store: bool) -> Fault:
        rng = self.rng
        at_s = rng.uniform(0.0, requests[-1].arrival_s + 0.5)
        engine, for_s = rng.randrange(num_engines), rng.choice((0.05, 0.5, 3.0))
        if has_store and rng.random() < 0.4:
            how = rng.choice(get_args(StoreFaultKind))
            return StoreTrouble(at_s=at_s, engine=engine, how=how, for_s=for_s, share=rng.random())
        kind = rng.choices(range(8), (4, 2, 1, 2, 2, 1, 5, 3))[0]
        if kind == 0:
            return WorkerCrash(at_s=at_s, engine=engine)
        if kind == 1:
            return SlowWorker(at_s=at_s, engine=engine, for_s=for_s, factor=rng.choice((3.0, 20.0)))
        if kind == 2:
            return StartFailures(at_s=at_s, engine=engine, count=rng.choice((1, 2, 5)))
        if kind == 3:
            return Disconnects(at_s=at_s, engine=engine, share=rng.choice((0.3, 1.0)))
        if kind == 4:
            return Overload(at_s=at_s, count=rng.randint(3, 12), max_tokens=8, seed=rng.randrange(1 << 16))
        if kind == 5:
            return Drained(at_s=at_s + 0.5, engine=engine)
        if kind == 6:
            where = rng.randrange(len(requests))
            position = rng.randint(0, 8)
            return rng.choice((BadRow, Poison))(request=where, position=position)
        actor = rng.choice(get_args(SlowActor))
        return SlowMessages(
            at_s=at_s, engine=engine, actor=actor, for_s=for_s, delay_s=rng.choice((0.001, 0.004, 0.015))
        )


def _roomy(engine: EngineSpec, requests: tuple[SimRequest, ...]) -> EngineSpec:
    """The engine with blocks for all requests at once and for ever."""
    size = engine.block_size
    blocks = sum((request.prompt.num_tokens + request.max_tokens) // size + 2 for request in requests)
    num_swa_blocks = 0
    if engine.sliding_window is not None:
        num_swa_blocks = blocks + least_swa_blocks(engine) * (engine.max_num_seqs + 1)
    return msgspec.structs.replace(
        engine,
        num_fa_blocks=blocks + engine.max_num_seqs + 8,
        num_swa_blocks=num_swa_blocks,
        max_queued_requests=1000,
    )
