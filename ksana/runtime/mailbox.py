"""Where an actor receives its messages: bounded, in order, never making the sender wait.

A sender that had to wait could deadlock with the receiver, so `put` is synchronous. That the bound is
never reached is arranged, not hoped for: every producer first takes one of a bounded number of slots
(`ksana.runtime.slots`), and each slot accounts for a fixed number of messages in each mailbox. So a
full mailbox is a bug and says so.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import trio

from ksana.errors import InvariantViolated

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Bounded queue of messages with one receiver.

    Invariants: at most `capacity` messages; `drain` returns them in the order of `put`.
    Cost: `put` under 1 µs, plus one trio reschedule when the receiver sleeps.
    """

    def __init__(self, name: str, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"mailbox {name!r}: capacity must be at least 1, not {capacity}")
        self.name = name
        self.capacity = capacity
        self._messages: deque[T] = deque()
        self._wakeup = trio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: T) -> None:
        """Append a message. After `close` it is dropped: the receiver is gone."""
        if self._closed:
            return
        if len(self._messages) >= self.capacity:
            raise InvariantViolated(
                f"mailbox {self.name!r} is full ({self.capacity}): {type(message).__name__} does not fit"
            )
        self._messages.append(message)
        self._wakeup.set()

    def close(self) -> None:
        """No more messages are taken. The receiver gets what is there, then `trio.EndOfChannel`."""
        self._closed = True
        self._wakeup.set()

    def clear(self) -> None:
        """Forget what is there: its receiver broke, and a new one starts afresh."""
        self._messages.clear()

    async def drain(self) -> list[T]:
        """Wait until there is something, then return all of it (never empty).

        Raises trio.EndOfChannel once the mailbox is closed and empty.
        """
        while not self._messages:
            if self._closed:
                raise trio.EndOfChannel
            self._wakeup = trio.Event()
            await self._wakeup.wait()
        messages = list(self._messages)
        self._messages.clear()
        return messages
