"""Requests asked of an engine, and what came of them, made to be compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from ksana.engine import Engine
from ksana.messages.outputs import Finished
from ksana.messages.requests import SamplingParams, TokensPrompt

from ..engines import listen
from .recording import Recording

SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}


@dataclass(frozen=True)
class Ask:
    """One request. Equal asks must get equal answers, in whatever company."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    text: str
    outcome: Finished
    digests: tuple[bytes, ...] | None = field(compare=False, repr=False, default=None)
    """Of the logits behind each token; None where nobody looked."""
    num_cached_tokens: int = field(compare=False, default=0)


def asks(prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], stop: tuple[str, ...]) -> list[Ask]:
    """Every other request samples, the rest are greedy; of these every other has stop strings."""
    made = []
    for number, (prompt, wanted) in enumerate(zip(prompts, max_tokens, strict=True)):
        changes = {"temperature": 0.0} if number % 2 == 0 else SAMPLED
        if number % 4 == 2:
            changes = changes | {"stop": stop}
        sampling = SamplingParams(seed=1000 + number, max_tokens=wanted, ignore_eos=True, **changes)
        made.append(Ask(tuple(prompt), sampling))
    return made


async def answer(
    engine: Engine,
    ask: Ask,
    recording: Recording | None = None,
    on_token: Callable[[int], None] | None = None,
) -> Answer:
    prompt = TokensPrompt(token_ids=ask.token_ids)
    stream = engine.generate(prompt, ask.sampling, cache_salt=ask.cache_salt)
    heard = await listen(stream, on_token=on_token)
    assert isinstance(heard.outcome, Finished), heard.outcome
    digests = None if recording is None else recording.of(stream.request_id, len(heard.token_ids))
    cached = heard.usage.num_cached_tokens
    return Answer(tuple(heard.token_ids), heard.text, heard.outcome, digests, cached)


async def play(
    engine: Engine,
    asked: Sequence[Ask],
    recording: Recording | None = None,
    *,
    spread_s: float = 0.0,
    num_passers_by: int = 0,
    on_token: Callable[[int], None] | None = None,
) -> list[Answer]:
    """The answers to `asked`, together; each begins somewhere within `spread_s`.

    Passers-by ask for the same prompts and others, and leave in the middle. `on_token` hears how many
    tokens the first request has.
    """
    rng = random.Random(5)
    answers: dict[int, Answer] = {}

    async def one(number: int, delay_s: float) -> None:
        await trio.sleep(delay_s)
        hears = on_token if number == 0 else None
        answers[number] = await answer(engine, asked[number], recording, hears)

    async def pass_by(ask: Ask, delay_s: float, num_tokens: int) -> None:
        await trio.sleep(delay_s)
        await listen(
            engine.generate(TokensPrompt(token_ids=ask.token_ids[::-1]), ask.sampling), leave_after=num_tokens
        )

    async with trio.open_nursery() as nursery:
        for number in range(len(asked)):
            nursery.start_soon(one, number, rng.random() * spread_s)
        for _ in range(num_passers_by):
            nursery.start_soon(pass_by, rng.choice(asked), rng.random() * spread_s, rng.randrange(1, 8))
    return [answers[number] for number in range(len(asked))]


def check_same(asked: Sequence[Ask], got: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """Ids, text, ending and, where both have them, every bit of the logits."""
    for number, (ask, one, other) in enumerate(zip(asked, got, expected, strict=True)):
        assert one == other, f"request {number}, prompt of {len(ask.token_ids)}, {ask.sampling}"
        if one.digests is not None and other.digests is not None:
            differ = [
                at
                for at, pair in enumerate(zip(one.digests, other.digests, strict=True))
                if len(set(pair)) > 1
            ]
            assert not differ, f"request {number}: other logits for output tokens {differ}"
