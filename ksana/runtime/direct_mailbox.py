"""A mailbox whose actor has no task to wake: it is activated where the message is put.

For simulations that want to be fast. Waking a task costs more than a small step of scheduling does.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from ksana.runtime.mailbox import Mailbox, T


class DirectMailbox(Mailbox[T]):
    """Hands over at once, in the sender's task, or, while its actor is active, when that has said everything.

    So messages of one sender keep their order, and no core is entered twice. What the core raises comes out
    of the sender's `put`. Not for an actor with timers.
    """

    def __init__(self, name: str, capacity: int) -> None:
        super().__init__(name, capacity)
        self._activate: Callable[[list[T]], None] | None = None
        self._is_active = False

    def put(self, message: T) -> None:
        super().put(message)
        if not self._is_active:
            self._hand_over()

    async def attend(self, activate: Callable[[list[T]], None]) -> None:
        """Have `activate` called with what comes, and first with what is there, until cancelled."""
        self._activate = activate
        try:
            self._hand_over()
            await trio.sleep_forever()
        finally:
            self._activate = None

    def _hand_over(self) -> None:
        if self._activate is None:
            return
        self._is_active = True
        try:
            while self._messages:
                messages = list(self._messages)
                self._messages.clear()
                self._activate(messages)
        finally:
            self._is_active = False
