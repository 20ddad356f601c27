"""What simulated clients ask: one request, its prompt, and where requests come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec

FIRST_TOKEN = 3
"""Lower ids are left to special tokens."""

SPELLING_BASE = 250
"""Ids a named text is spelled with: FIRST_TOKEN up to FIRST_TOKEN + 249, which every vocabulary has."""

_DIGITS = 4

MAX_CONTENT_ID = SPELLING_BASE**_DIGITS - 1


class NamedText(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="named"):
    """`num_tokens` tokens that are known by a number only: equal numbers are equal text, different numbers
    differ within the first four tokens (the first already, for neighbours)."""

    content_id: int
    num_tokens: int


class ListedText(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="listed"):
    """Text whose token ids are given."""

    token_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class PromptSource(msgspec.Struct, frozen=True, gc=False):
    """A prompt that is made when it is needed: a long trace's ids would fill the memory.

    `token_ids()` costs about 2 ns per token and keeps nothing.
    """

    parts: tuple[NamedText | ListedText, ...]

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)

    def token_ids(self) -> tuple[int, ...]:
        ids: list[int] = []
        for part in self.parts:
            ids += part.token_ids if isinstance(part, ListedText) else spelled(part)
        return tuple(ids)

    def then(self, *parts: NamedText | ListedText) -> PromptSource:
        """This prompt and what follows it."""
        return PromptSource((*self.parts, *parts))


def spelled(text: NamedText) -> tuple[int, ...]:
    """The content id in base 250, least significant digit first, over and over.

    Raises ValueError for an id above MAX_CONTENT_ID, which four digits cannot tell apart.
    """
    number, digits = text.content_id, []
    for _ in range(_DIGITS):
        number, digit = divmod(number, SPELLING_BASE)
        digits.append(FIRST_TOKEN + digit)
    if number:
        raise ValueError(f"content ids go from 0 to {MAX_CONTENT_ID}, not {text.content_id}")
    whole, rest = divmod(text.num_tokens, _DIGITS)
    return tuple(digits) * whole + tuple(digits[:rest])


class SimRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request and what its client will do. Times are seconds of the world's clock."""

    arrival_s: float
    prompt: PromptSource
    num_output_tokens: int | None = None
    """What the model answers before it ends by itself, its end token included; None: it goes on until
    `max_tokens`."""
    max_tokens: int
    min_tokens: int = 0
    """The model's own end is not sampled before so many output tokens."""
    ignore_eos: bool = False
    """The model's own end does not end the request."""
    stop_token_id: int | None = None
    """What the model says at its end instead of its end token; the client names it as a stop token."""
    seed: int = 0
    cache_salt: str = ""
    timeout_s: float = 1e6
    leaves_after: int | None = None
    """The client is gone once it has so many output tokens; 0: as soon as it has asked."""
    stop_after: int | None = None
    """The front end finds a stop string that ends with this output token (0-based)."""
    session: int | None = None
    """Which user or conversation this belongs to, where an answer decides what is asked next."""


class Ending(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How a request ended, as its client saw it."""

    request: SimRequest
    at_s: float
    finished: bool
    """False: failed, refused, or the client left."""
    output_ids: tuple[int, ...]


class Workload(Protocol):
    """Where requests come from. One world takes it once."""

    def first(self) -> Iterator[SimRequest]:
        """What is asked whatever happens, by arrival. Read lazily: one request ahead of the clock."""
        ...

    def after(self, ending: Ending) -> SimRequest | None:
        """What this ending leads to, if anything; it arrives at `ending.at_s` or later."""
        ...


class OpenLoop:
    """Requests that come however slow the answers are."""

    def __init__(self, requests: Iterator[SimRequest]) -> None:
        self._requests = requests

    def first(self) -> Iterator[SimRequest]:
        return self._requests

    def after(self, ending: Ending) -> SimRequest | None:  # noqa: ARG002 - none follows
        return None
