"""A fingerprint of everything that was said in a run, and how often each kind of message was."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import msgspec

from ksana.messages.base import Message
from ksana.runtime.actor import Address, Said


class MessageLog:
    """A tap. Memory: O(1), whatever the length of the run.

    A message is counted where it is said, or, if it comes from outside the actors (producers, the engine),
    where it is received.
    """

    def __init__(self) -> None:
        self.num_activations = 0
        self.counts: Counter[str] = Counter()
        self._sha256 = hashlib.sha256()
        self._encoder = msgspec.msgpack.Encoder()

    def __call__(
        self, actor: Address, now_s: float, messages: Sequence[Message], said: Sequence[Said]
    ) -> None:
        self.num_activations += 1
        self._sha256.update(self._encoder.encode((actor, now_s, messages, said)))
        for message in messages:
            if type(message).__name__ in FROM_OUTSIDE and actor == FROM_OUTSIDE[type(message).__name__]:
                self.counts[type(message).__name__] += 1
        for _, message in said:
            if type(message).__name__ not in FROM_OUTSIDE:
                self.counts[type(message).__name__] += 1

    @property
    def num_messages(self) -> int:
        return self.counts.total()

    def hexdigest(self) -> str:
        """SHA-256 over every activation: actor, time, messages in, messages out."""
        return self._sha256.hexdigest()


FROM_OUTSIDE: dict[str, Address] = {
    "Generate": "tokenizer",
    "Abort": "tokenizer",
    "PromptEncoded": "tokenizer",
    "Drain": "scheduler",
    "StoreFound": "remote_cache_loader",
    "StoreFetched": "remote_cache_loader",
    "StoreSaved": "remote_cache_loader",
}
"""Messages that no core says, or that the tokenizer only passes on, and where they come in."""
