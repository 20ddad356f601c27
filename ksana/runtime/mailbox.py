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
    Cost: `put` under 1 µs, plus one trio reschedule when the receiver sleeps; `drain` then about 4 µs.
    """

    def __init__(self, name: str, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"mailbox {name!r}: capacity must be at least 1, not {capacity}")
        self.name = name
        self.capacity = capacity
        self._messages: deque[T] = deque()
        self._receiver: trio.lowlevel.Task | None = None
        """Who sleeps in `drain`."""
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
        self._wake()

    def close(self) -> None:
        """No more messages are taken. The receiver gets what is there, then `trio.EndOfChannel`."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        # Without a trio.Event per message: that was a third of what a message costs.
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            trio.lowlevel.reschedule(receiver)

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
            if self._receiver is not None:
                raise InvariantViolated(f"mailbox {self.name!r} has two receivers")
            self._receiver = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._stop_waiting)
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def _stop_waiting(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._receiver = None
        return trio.lowlevel.Abort.SUCCEEDED
