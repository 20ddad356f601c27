"""Where outputs wait for their producer: one slot per request, never making the sender wait.

Slots also bound the engine: a producer opens one before it says anything, and when none is left it is
told 429 at once. So every queue behind (tokenizer, scheduler) is bounded by the number of slots.
A slot's own content is bounded because deltas not yet taken are joined, and tokens end at max_tokens.
"""

from __future__ import annotations

import trio

from ksana.errors import ServiceError
from ksana.messages.base import Message, RequestId
from ksana.messages.outputs import Ended, OutputEvent, PromptAccepted, TextDelta


class Slot:
    """The waiting output of one request, for one reader."""

    def __init__(self, request_id: RequestId) -> None:
        self.request_id = request_id
        self._events: list[OutputEvent] = []
        self._wakeup = trio.Event()
        self.ended = False

    def put(self, event: OutputEvent) -> None:
        last = self._events[-1] if self._events else None
        if (
            isinstance(event, TextDelta)
            and isinstance(last, TextDelta)
            and last.choice_index == event.choice_index
        ):
            self._events[-1] = TextDelta(
                request_id=event.request_id,
                text=last.text + event.text,
                token_ids=last.token_ids + event.token_ids,
                choice_index=event.choice_index,
            )
        else:
            self._events.append(event)
        self.ended = self.ended or isinstance(event, Ended)
        self._wakeup.set()

    async def take(self) -> list[OutputEvent]:
        """Wait until there is something, then return all of it (never empty). `Ended` is the last ever."""
        while not self._events:
            self._wakeup = trio.Event()
            await self._wakeup.wait()
        events, self._events = self._events, []
        return events


class Slots:
    """All open slots of an engine.

    Invariants: at most `capacity` slots; request ids are given out in increasing order, never twice.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_late_events = 0
        """Events for a slot already closed: its producer left. Normal, counted."""
        self.num_refused = 0
        self._slots: dict[RequestId, Slot] = {}
        self._next_id: RequestId = 1

    def __len__(self) -> int:
        return len(self._slots)

    def open(self) -> Slot:
        """Take a slot. Raises ServiceError 429 when all are taken."""
        if len(self._slots) >= self.capacity:
            self.num_refused += 1
            raise ServiceError(
                f"{self.capacity} requests are running or waiting, and no more are queued; try again later",
                status=429,
                retry_after_s=1,
                code="queue_full",
                type="rate_limit_error",
            )
        slot = Slot(self._next_id)
        self._next_id += 1
        self._slots[slot.request_id] = slot
        return slot

    def close(self, slot: Slot) -> None:
        """Give the slot back. What still comes for it is dropped and counted. Closing twice is allowed."""
        self._slots.pop(slot.request_id, None)

    def post(self, message: Message) -> None:
        """Deliver an output event to the slot of its request."""
        assert isinstance(message, PromptAccepted | TextDelta | Ended)
        slot = self._slots.get(message.request_id)
        if slot is None:
            self.num_late_events += 1
        else:
            slot.put(message)
