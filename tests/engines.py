"""Engines for tests: tiny model files, with a simulated device or a real worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import trio

from ksana.client import OutputStream
from ksana.config import Settings
from ksana.costs.step_cost import LinearStepCost
from ksana.devices.simulated import Fault, SimulatedBackend, StartFault
from ksana.devices.simulated_worker import SimulatedWorker, TokenSource, hashed_tokens
from ksana.engine import Engine
from ksana.messages.blocks import PoolUse
from ksana.messages.outputs import Ended, Outcome, PromptAccepted, TextDelta, Usage
from ksana.messages.requests import SamplingParams, TokensPrompt
from ksana.messages.status import EngineStatus
from ksana.model_setup import ModelFiles, ModelSetup, find_model
from ksana.stores.store import Store

COST = LinearStepCost(fixed_s=0.01, per_token_s=1e-4, per_attended_token_s=0)


def model_files(directory: Path) -> ModelFiles:
    return find_model(Settings(model=str(directory)), lambda _text: None)


def simulated(
    files: ModelFiles,
    *,
    tokens: TokenSource | None = None,
    fault: Fault | None = None,
    start_fault: StartFault | None = None,
    made: list[SimulatedBackend] | None = None,
    tap: Any = None,
    store: Store | None = None,
    **settings: Any,
) -> Engine:
    """An engine whose device checks every block it reads, on whatever clock trio runs on, and whose caches
    are checked after every message. With a `store`, that is its remote cache."""

    def backend(setup: ModelSetup) -> SimulatedBackend:
        config = setup.cache_config()
        one = SimulatedBackend(
            lambda: SimulatedWorker.of_cache(config, tokens or hashed_tokens(320), setup.staging),
            cost=COST,
            fault=fault,
            start_fault=start_fault,
        )
        if made is not None:
            made.append(one)
        return one

    defaults: dict[str, Any] = {"max_model_len": 512, "max_num_batched_tokens": 64, "kv_cache_memory": "2MiB"}
    return Engine(
        Settings(model=str(files.path), **(defaults | settings)),
        files=files,
        backend=backend,
        threads=False,
        tap=tap,
        store=store,
        check_messages=True,
    )


class Heard:
    """All that one request said."""

    def __init__(self) -> None:
        self.accepted: PromptAccepted | None = None
        self.token_ids: list[int] = []
        self.text = ""
        self.endings: list[Ended] = []

    @property
    def outcome(self) -> Outcome:
        assert len(self.endings) == 1, self.endings
        return self.endings[0].outcome

    @property
    def usage(self) -> Usage:
        return self.endings[0].usage


async def listen(
    stream: OutputStream, *, leave_after: int | None = None, on_token: Callable[[int], None] | None = None
) -> Heard:
    """Read a stream to its end, or until `leave_after` tokens came. Checks the order of events."""
    heard = Heard()
    async with stream:
        async for event in stream:
            assert not heard.endings, "something follows the ending"
            if isinstance(event, PromptAccepted):
                assert heard.accepted is None
                heard.accepted = event
            elif isinstance(event, TextDelta):
                assert heard.accepted is not None
                heard.token_ids += event.token_ids
                heard.text += event.text
                if on_token is not None:
                    on_token(len(heard.token_ids))
                if leave_after is not None and len(heard.token_ids) >= leave_after:
                    return heard
            else:
                heard.endings.append(event)
    return heard


def prompt(*token_ids: int) -> TokensPrompt:
    return TokensPrompt(token_ids=token_ids)


def greedy(max_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(
        **({"seed": 1, "temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | changes)
    )


def is_balanced(use: PoolUse | None) -> bool:
    """Nothing is referenced, deferred or held: all blocks are free or cache."""
    return use is None or use.num_free + use.num_cached == use.num_blocks


async def settled(engine: Engine) -> EngineStatus:
    """The status once nothing is in flight any more and late releases went through."""
    with trio.fail_after(60):
        while True:
            status = engine.status()
            if not status.has_work and status.num_open_slots == 0 and is_balanced(status.fa_use):
                return status
            await trio.sleep(0.05)


def most_remote_loads() -> int:
    """The upper bound of `max_remote_loads`."""
    annotation = get_type_hints(Settings, include_extras=True)["max_remote_loads"]
    bound = annotation.__metadata__[0].le
    assert isinstance(bound, int)
    return bound
