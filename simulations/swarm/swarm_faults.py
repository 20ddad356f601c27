"""Random faults for the small worlds of the swarm."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import get_args

from simulations.faults import (
    BadRow,
    Disconnects,
    Drained,
    Fault,
    OnMessage,
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
from simulations.requests import SimRequest


def draw_faults(
    rng: random.Random, requests: Sequence[SimRequest], num_engines: int, num: int, *, has_store: bool
) -> tuple[Fault, ...]:
    """About `num` of them, most at times when something goes on. Some come in pairs."""
    faults: list[Fault] = []
    while len(faults) < num:
        at_s = _when(rng, requests)
        engine, for_s = rng.randrange(num_engines), rng.choice((0.05, 0.2, 0.5, 3.0))
        if has_store and rng.random() < 0.4:
            how = rng.choice(get_args(StoreFaultKind))
            faults.append(StoreTrouble(at_s=at_s, engine=engine, how=how, for_s=for_s, share=rng.random()))
            continue
        draw = rng.choices(tuple(_KINDS), tuple(_KINDS.values()))[0]
        faults += draw(rng, at_s, engine, for_s, len(requests))
    return tuple(faults)


def draw_crashes_when_full(rng: random.Random) -> tuple[Fault, ...]:
    """The worker dies in a step during which everything else was refused, once or twice."""
    numbers = rng.sample(range(1, 6), rng.randint(1, 2))
    return tuple(OnMessage(message="BlocksRefused", nth=nth, do="crash") for nth in numbers)


def _when(rng: random.Random, requests: Sequence[SimRequest]) -> float:
    """Soon after some request came, or any time."""
    if rng.random() < 0.7:
        return rng.choice(requests).arrival_s + rng.uniform(0.0, 0.15)
    return rng.uniform(0.0, requests[-1].arrival_s + 0.5)


def _crash(_rng: random.Random, at_s: float, engine: int, _for_s: float, _num: int) -> list[Fault]:
    return [WorkerCrash(at_s=at_s, engine=engine)]


def _crash_and_failing_starts(
    rng: random.Random, at_s: float, engine: int, _for_s: float, _num: int
) -> list[Fault]:
    return [
        StartFailures(at_s=at_s, engine=engine, count=rng.choice((1, 2, 5))),
        WorkerCrash(at_s=at_s, engine=engine),
    ]


def _crash_in_slow_talk(rng: random.Random, at_s: float, engine: int, for_s: float, _num: int) -> list[Fault]:
    """News of the crash crosses with what was on its way."""
    crash_s = at_s + rng.uniform(0.0, for_s)
    return [_slow_talk(rng, at_s, engine, for_s), WorkerCrash(at_s=crash_s, engine=engine)]


def _slow_worker(rng: random.Random, at_s: float, engine: int, for_s: float, _num: int) -> list[Fault]:
    return [SlowWorker(at_s=at_s, engine=engine, for_s=for_s, factor=rng.choice((3.0, 20.0)))]


def _disconnects(rng: random.Random, at_s: float, engine: int, _for_s: float, _num: int) -> list[Fault]:
    return [Disconnects(at_s=at_s, engine=engine, share=rng.choice((0.3, 1.0)))]


def _overload(rng: random.Random, at_s: float, _engine: int, _for_s: float, _num: int) -> list[Fault]:
    return [Overload(at_s=at_s, count=rng.randint(3, 12), max_tokens=8, seed=rng.randrange(1 << 16))]


def _drained(_rng: random.Random, at_s: float, engine: int, _for_s: float, _num: int) -> list[Fault]:
    return [Drained(at_s=at_s + 0.5, engine=engine)]


def _of_a_request(rng: random.Random, _at_s: float, _engine: int, _for_s: float, num: int) -> list[Fault]:
    return [rng.choice((BadRow, Poison, Poison))(request=rng.randrange(num), position=rng.randint(0, 8))]


def _slow_messages(rng: random.Random, at_s: float, engine: int, for_s: float, _num: int) -> list[Fault]:
    return [_slow_talk(rng, at_s, engine, for_s)]


def _slow_tokenizer(rng: random.Random, at_s: float, engine: int, _for_s: float, _num: int) -> list[Fault]:
    """Stop strings are found when more tokens have come."""
    delay_s = rng.choice((0.015, 0.03, 0.06))
    return [SlowMessages(at_s=at_s, engine=engine, actor="tokenizer", for_s=3.0, delay_s=delay_s)]


def _on_message(rng: random.Random, _at_s: float, engine: int, _for_s: float, _num: int) -> list[Fault]:
    message, nth = rng.choice(_MESSAGES), rng.randint(1, rng.choice((3, 12, 60)))
    return [OnMessage(engine=engine, message=message, nth=nth, do=rng.choice(("crash", "leave")))]


_MESSAGES = (
    "AddRequest", "StepPlan", "StepDone", "PlanBlocks", "BlocksPlanned", "BlocksRefused", "BlocksRefused",
    "SwaBatch", "SwaBatchDone", "WorkerReady", "LoadPrefix", "StoreFound", "PrefixBlockNumber",
    "AllocateBlocksForRemoteCache", "RemoteBlocksAllocated", "StoreFetched", "StagingCopied",
    "RemoteLoadingConfirmed", "PrefixLoaded", "BlocksFilled", "HoldBlocks", "BlocksHeld", "CancelLoad",
)  # fmt: skip
"""When something is under way."""


def _slow_talk(rng: random.Random, at_s: float, engine: int, for_s: float) -> Fault:
    actor = rng.choice(get_args(SlowActor))
    delay_s = rng.choice((0.001, 0.004, 0.015, 0.06))
    return SlowMessages(at_s=at_s, engine=engine, actor=actor, for_s=for_s, delay_s=delay_s)


_KINDS: dict[Callable[[random.Random, float, int, float, int], list[Fault]], float] = {
    _crash: 3,
    _crash_and_failing_starts: 1,
    _crash_in_slow_talk: 2,
    _slow_worker: 1,
    _disconnects: 2,
    _overload: 2,
    _drained: 0.7,
    _of_a_request: 4,
    _slow_messages: 3,
    _slow_tokenizer: 1.5,
    _on_message: 6,
}
