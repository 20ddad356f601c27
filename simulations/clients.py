"""Simulated producers: what they ask, when they lose patience, and whether they got what they should."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import trio

from ksana.client import OutputStream
from ksana.devices.simulated_worker import KnownRequest, TokenSource
from ksana.errors import InvariantViolated, ServiceError
from ksana.messages.base import RequestId
from ksana.messages.outputs import Aborted, Ended, Failed, Finished, PromptAccepted, TextDelta
from ksana.messages.requests import (
    ChatMessage,
    ChatPrompt,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from simulations.toy_model import LONG


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request and what its client will do."""

    prompt: Prompt
    sampling: SamplingParams
    timeout_s: float
    leave_after: int | None = None
    """Output tokens after which the client is gone; 0: before any came."""
    cache_salt: str = ""


def make_ask(rng: random.Random, vocab_size: int, max_tokens: int) -> Ask:
    """Mixed lengths and habits: two in five share one of eight prefixes, some leave, some are impatient."""
    kind = rng.random()
    prompt: Prompt
    if kind < 0.4:
        shared = random.Random(rng.randrange(8)).choices(range(3, vocab_size), k=400)
        own = rng.choices(range(3, vocab_size), k=rng.randint(1, 60))
        prompt = TokensPrompt(token_ids=tuple(shared[: rng.choice((64, 200, 400))] + own))
    elif kind < 0.6:
        prompt = TokensPrompt(token_ids=tuple(rng.choices(range(3, vocab_size), k=rng.randint(1, 500))))
    elif kind < 0.8:
        words = " ".join(str(rng.randrange(10_000)) for _ in range(rng.randint(1, 40)))
        prompt = ChatPrompt(messages=(ChatMessage(role="user", content=words),))
    elif kind < 0.95:
        prompt = TextPrompt(text="".join(rng.choices("abc déf\n", k=rng.randint(1, 200))))
    else:
        prompt = TextPrompt(text=LONG * rng.randint(600, 3000))
    sampling = SamplingParams(
        seed=rng.randrange(1 << 32),
        max_tokens=rng.randint(1, max_tokens),
        min_tokens=0,
        stop=("q",) if rng.random() < 0.4 else (),
        ignore_eos=rng.random() < 0.2,
    )
    return Ask(
        prompt=prompt,
        sampling=sampling,
        timeout_s=rng.choice((0.5, 5.0)) if rng.random() < 0.1 else 10_000.0,
        leave_after=rng.randint(0, 10) if rng.random() < 0.15 else None,
        cache_salt=rng.choice(("", "", "", "tenant")),
    )


Doors = dict[RequestId, Callable[[], None]]


class Tally:
    """How requests ended, as their clients saw it."""

    def __init__(self) -> None:
        self.endings: Counter[str] = Counter()

    def num(self) -> int:
        return self.endings.total()


async def run_client(
    ask: Ask,
    generate: Callable[..., OutputStream],
    expected: TokenSource,
    is_stop_char: Callable[[int], bool],
    tally: Tally,
    doors: Doors | None = None,
) -> None:
    """Send one request and hold its answer against the script. Raises InvariantViolated where they differ.

    Through its door in `doors` a client leaves whenever somebody else wants it to.
    """
    try:
        stream = generate(
            ask.prompt, ask.sampling, timeout_s=ask.timeout_s, cache_salt=ask.cache_salt, external_id=""
        )
    except ServiceError as error:
        tally.endings[f"refused {error.status}"] += 1
        return
    with trio.CancelScope() as scope:
        if doors is not None:

            def leave() -> None:
                stream.close()
                scope.cancel()

            doors[stream.request_id] = leave
        await _follow(ask, stream, expected, is_stop_char, tally)
    if scope.cancelled_caught:
        tally.endings["left"] += 1


async def _follow(
    ask: Ask,
    stream: OutputStream,
    expected: TokenSource,
    is_stop_char: Callable[[int], bool],
    tally: Tally,
) -> None:
    accepted: PromptAccepted | None = None
    token_ids: list[int] = []
    async with stream:
        async for event in stream:
            if isinstance(event, PromptAccepted):
                accepted = event
            elif isinstance(event, TextDelta):
                token_ids += event.token_ids
            else:
                check_tokens(ask, accepted, token_ids, event, expected, is_stop_char)
                tally.endings[ending_name(event)] += 1
                return
            if ask.leave_after is not None and len(token_ids) >= ask.leave_after:
                tally.endings["left"] += 1
                return
    raise InvariantViolated(f"request {stream.request_id} ended without an ending")


def ending_name(event: Ended) -> str:
    outcome = event.outcome
    if isinstance(outcome, Finished):
        return f"finished {outcome.reason}"
    if isinstance(outcome, Failed):
        return f"failed {outcome.status}"
    assert isinstance(outcome, Aborted)
    return "aborted"


def check_tokens(
    ask: Ask,
    accepted: PromptAccepted | None,
    token_ids: Sequence[int],
    ended: Ended,
    expected: TokenSource,
    is_stop_char: Callable[[int], bool],
) -> None:
    """Each token as scripted, none missing and none doubled, whatever happened on the way."""
    if accepted is None:
        if token_ids or isinstance(ended.outcome, Finished):
            raise InvariantViolated(f"request {ended.request_id} has output but was never accepted")
        return
    known = KnownRequest(
        request_id=ended.request_id,
        prompt_len=len(accepted.prompt_token_ids),
        token_ids=list(accepted.prompt_token_ids),
        sampling=ask.sampling,
    )
    scripted = [expected(known, position) for position in range(len(token_ids))]
    if list(token_ids) != scripted:
        raise InvariantViolated(f"request {ended.request_id} got {list(token_ids)}, not {scripted}")
    if ended.usage.num_output_tokens != len(token_ids):
        raise InvariantViolated(
            f"request {ended.request_id}: usage says {ended.usage.num_output_tokens} tokens, "
            f"{len(token_ids)} came"
        )
    if ask.sampling.stop and any(map(is_stop_char, token_ids[:-1])):
        raise InvariantViolated(f"request {ended.request_id} went on after its stop string")


async def open_loop(
    rng: random.Random,
    num_requests: int,
    rate_per_s: float,
    start: Callable[[Ask], None],
    make: Callable[[random.Random], Ask],
) -> None:
    """Requests at random times (a Poisson process), however slow the answers are."""
    for _ in range(num_requests):
        await trio.sleep(rng.expovariate(rate_per_s))
        start(make(rng))
