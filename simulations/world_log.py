"""A fingerprint of all that is said in a world."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from ksana.messages.base import Message
from ksana.runtime.actor import Address, Said, Tap


class WorldLog:
    """A fingerprint of every activation of every actor of every engine, in order, and counts of messages."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._sha256 = hashlib.sha256()
        self._encode: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode

    def tap(self, engine: str) -> Tap:
        def tap(actor: Address, now_s: float, messages: Sequence[Message], said: Sequence[Said]) -> None:
            self._sha256.update(self._encode((engine, actor, now_s, messages, said)))
            for _, message in said:
                self.counts[type(message).__name__] += 1

        return tap

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()
