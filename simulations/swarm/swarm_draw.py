"""A random small scenario per seed: settings, requests and faults, rough on purpose.

Pools are tiny, so that evictions, preemptions and refusals are the rule; texts are few, so that prefixes are
shared, forked and met again. Each seed has a style, which leans on one part of the code.
"""

from __future__ import annotations

import random
from typing import Literal, get_args

import msgspec

from ksana.cache.cache_config import SwaEviction
from ksana.costs.step_cost import LinearStepCost
from ksana.scheduling.settings import Admission
from simulations.engine import EngineSpec
from simulations.requests import ListedText, NamedText, PromptSource, SimRequest
from simulations.routing import Routing
from simulations.scenario import Scenario, StoreSpec, WorldSpec, least_swa_blocks
from simulations.script import STOP_TOKEN_ID, Script
from simulations.swarm.swarm_faults import draw_crashes_when_full, draw_faults

Style = Literal["calm", "sharing", "usual", "growing", "loading", "storm", "crowded"]
"""calm: room for everything, and no faults, so that nothing may go wrong. sharing: the same, with two engines
and a fast store. growing: short prompts and long
answers, in pools that hold the prompts. loading: two engines, one slow store, the same texts again and again.
storm: many faults. crowded: few fit the pool at once, others come meanwhile, and the worker dies when
everything was refused. usual: a bit of everything."""

_STYLES: dict[Style, float] = {
    "calm": 0.15,
    "sharing": 0.1,
    "usual": 0.2,
    "growing": 0.15,
    "loading": 0.2,
    "storm": 0.12,
    "crowded": 0.08,
}
_SPARE_BLOCKS: dict[Style, tuple[int, ...]] = {
    "growing": (0, 1, 2, 4),
    "loading": (0, 4, 12, 24, 40),
    "crowded": (0, 0, 1),
}
"""Beyond what one request can need."""
_STEP_TOKENS: dict[Style, tuple[int, ...]] = {"growing": (3, 5, 8, 8), "crowded": (16, 32, 64)}
_SALTS = ("", "", "", "", "tenant")


def draw_scenario(seed: int) -> Scenario:
    """The scenario of a seed; equal seeds, equal scenarios."""
    return _Drawing(random.Random(seed * 2 + 1)).scenario(seed)


class _Drawing:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.style: Style = rng.choices(tuple(_STYLES), tuple(_STYLES.values()))[0]
        chance = {"calm": 0.0, "crowded": 0.0, "sharing": 1.0, "loading": 1.0, "storm": 0.5}.get(
            self.style, 0.25
        )
        self.is_calm = self.style in ("calm", "sharing")
        self.has_store = rng.random() < chance

    def scenario(self, seed: int) -> Scenario:
        rng = self.rng
        engine = self._engine()
        num_engines = 2 if self.style == "sharing" or rng.random() < (0.8 if self.has_store else 0.1) else 1
        if self.style == "crowded":
            num_engines = 1
        requests = self._requests(engine)
        faults = draw_faults(rng, requests, num_engines, self._num_faults(), has_store=self.has_store)
        if self.style == "crowded":
            faults = draw_crashes_when_full(rng)
        if self.is_calm:
            engine = _roomy(engine, requests)
        world = WorldSpec(
            engines=(engine,),
            replicas=num_engines,
            routing="round_robin" if self.style in ("sharing", "loading") else rng.choice(get_args(Routing)),
            cost=LinearStepCost(fixed_s=0.01, per_token_s=self._per_token_s(), per_attended_token_s=1e-6),
            store=self._store() if self.has_store else None,
            faults=faults,
            fidelity="checked",
            sample_every_s=0.0,
            until_s=1e5 + 1e4,
        )
        return Scenario(title=f"swarm seed {seed}, {self.style}", world=world, seed=seed, requests=requests)

    def _per_token_s(self) -> float:
        return 2e-3 if self.style == "sharing" else self.rng.choice((0.0, 1e-4, 1e-3))

    def _num_faults(self) -> int:
        rng = self.rng
        if self.is_calm or (self.style != "storm" and rng.random() < 0.3):
            return 0
        return rng.randint(4, 9) if self.style == "storm" else rng.randint(1, 4)

    def _store(self) -> StoreSpec:
        rng = self.rng
        if self.style == "sharing":
            return StoreSpec(latency_s=0.002, bytes_per_s=1e7)
        if self.style == "loading":
            return StoreSpec(
                latency_s=rng.choice((0.003, 0.03, 0.1)), bytes_per_s=rng.choice((1e4, 1e5, 2e6))
            )
        return StoreSpec(latency_s=0.003, bytes_per_s=rng.choice((1e5, 2e6)))

    # Engines

    def _engine(self) -> EngineSpec:
        rng = self.rng
        is_usual = self.style not in ("growing", "loading")
        block_size = rng.choice((1, 2, 3, 4, 4, 5, 8, 8, 16) if is_usual else (1, 2, 3, 4))
        max_model_len = rng.randint(3 * block_size, 24 * block_size) + (8 if is_usual else 40)
        spare = rng.choice(_SPARE_BLOCKS.get(self.style, (0, 1, 2, 4, 8, 16, 40)))
        num_fa_blocks = -(-(max_model_len - 1) // block_size) + spare
        if self.style in ("usual", "storm") and rng.random() < 0.15:
            num_fa_blocks = max(2, num_fa_blocks * rng.randint(3, 8) // 10)  # some requests can never run
        engine = EngineSpec(
            block_size=block_size,
            num_fa_blocks=num_fa_blocks,
            max_num_seqs=rng.randint(3, 8) if self.style == "growing" else rng.randint(1, 8),
            max_num_batched_tokens=rng.choice(_STEP_TOKENS.get(self.style, (3, 5, 8, 16, 32, 64))),
            max_model_len=max_model_len,
            max_queued_requests=rng.choice((2, 100, 100, 100)),
            admission=rng.choice(get_args(Admission)) if rng.random() < 0.2 else "room_to_grow",
            hold_when_short=rng.random() < 0.1,
            plan_ahead=rng.random() < (0.95 if self.style == "crowded" else 0.7),
            enable_prefix_caching=self.has_store or rng.random() < 0.9,
            window_open_at_start=rng.random() < 0.7,
            swa_eviction=rng.choice(get_args(SwaEviction)),
            max_remote_loads=rng.randint(1, 4),
            remote_load_timeout_s=rng.choice((0.1, 1.0, 5.0)),
            remote_write_back=self.style in ("sharing", "loading") or rng.random() < 0.85,
            num_staging_slots=64 if self.style == "sharing" else rng.choice((4, 8, 32)),
            start_time_s=rng.choice((0.05, 0.5)),
            step_timeout_s=20.0,
        )
        return self._with_window(engine)

    def _with_window(self, engine: EngineSpec) -> EngineSpec:
        rng = self.rng
        if rng.random() < 0.4:
            return engine
        num_blocks = rng.randint(3, 10) if self.style == "growing" else rng.randint(1, 5)
        engine = msgspec.structs.replace(
            engine, sliding_window=rng.randint(1, num_blocks * engine.block_size)
        )
        spare = rng.choice((0, 0, 1, 2) if self.style == "growing" else (0, 1, 2, 5, 12, 30))
        return msgspec.structs.replace(engine, num_swa_blocks=least_swa_blocks(engine) + spare)

    # Requests

    def _requests(self, engine: EngineSpec) -> tuple[SimRequest, ...]:
        rng = self.rng
        pauses_s: dict[Style, tuple[float, ...]] = {
            "sharing": (1.0,),
            "loading": (0.05, 0.2),
            "crowded": (0.02, 0.05),
        }
        pause_s = rng.choice(pauses_s.get(self.style, (0.0, 0.02, 0.1, 0.5)))
        shared = [NamedText(n, rng.randint(1, max(1, engine.max_model_len * 2 // 3))) for n in range(3)]
        requests: list[SimRequest] = []
        arrival_s = 0.0
        fewest = 20 if self.style in ("sharing", "loading") else 2
        for number in range(rng.choice((rng.randint(fewest, 24), rng.randint(20, 60)))):
            arrival_s += rng.expovariate(1 / pause_s) if pause_s else 0.0
            if rng.random() < 0.1:
                arrival_s += 3.0
            prompt = self._prompt(number, shared, requests, engine)
            requests.append(self._request(arrival_s, prompt, engine))
        return tuple(requests)

    def _prompt(
        self, number: int, shared: list[NamedText], before: list[SimRequest], engine: EngineSpec
    ) -> PromptSource:
        rng = self.rng
        kind = rng.random()
        if self.style == "growing" and kind < 0.7:
            return PromptSource((NamedText(100 + number, rng.randint(1, 2 * engine.block_size)),))
        if self.style == "crowded":
            length = rng.randint(engine.max_model_len // 2, engine.max_model_len - 1)
            return PromptSource((NamedText(100 + number, length),))
        again = 0.5 if self.style in ("sharing", "loading") else 0.15
        if kind < again and before:
            return rng.choice(before).prompt
        if kind < again + 0.25 and before:
            last = rng.choice(before)
            answer = Script(last, last.prompt.token_ids(), keep_prompt=False).tokens(0, last.max_tokens)
            said = ListedText(answer[: rng.randint(1, len(answer))])
            return last.prompt.then(said, NamedText(100 + number, rng.randint(1, 12)))
        own = NamedText(100 + number, rng.randint(1, 40))
        if kind < again + 0.6:
            return PromptSource((rng.choice(shared), own))
        return PromptSource((own,))

    def _request(self, arrival_s: float, prompt: PromptSource, engine: EngineSpec) -> SimRequest:
        rng = self.rng
        room = engine.max_model_len - 1
        if prompt.num_tokens > room and rng.random() < 0.9:
            prompt = PromptSource((ListedText(prompt.token_ids()[: rng.randint(1, room)]),))
        longest = 80 if self.style == "growing" or (self.style == "loading" and rng.random() < 0.5) else 40
        if self.style == "crowded":
            longest = rng.choice((1, 2, 5))
        max_tokens = rng.randint(1, min(longest, max(1, engine.max_model_len - prompt.num_tokens)))
        is_impatient = not self.is_calm and rng.random() < (0.2 if self.style == "loading" else 0.08)
        return SimRequest(
            arrival_s=arrival_s,
            prompt=prompt,
            num_output_tokens=rng.randint(1, longest) if rng.random() < 0.5 else None,
            max_tokens=max_tokens,
            min_tokens=rng.randint(1, max_tokens) if rng.random() < 0.2 else 0,
            ignore_eos=rng.random() < 0.1,
            stop_token_id=STOP_TOKEN_ID if rng.random() < 0.15 else None,
            seed=rng.randrange(4),
            cache_salt=rng.choice(_SALTS),
            timeout_s=rng.choice((0.05, 0.3)) if is_impatient else 1e6,
            leaves_after=rng.randint(0, 6) if rng.random() < 0.12 else None,
            stop_after=rng.randint(0, 8) if rng.random() < 0.2 else None,
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
        max_remote_loads=1 if engine.max_remote_loads == 1 else 8,
        remote_load_timeout_s=5.0,
    )
