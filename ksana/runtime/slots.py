"""Where outputs wait for their producer: one slot per request, never making the sender wait.

Slots also bound the engine: a producer opens one before it says anything, and when none is left it is
told 429 at once. A slot counts until its producer has left *and* the request has ended, so every queue
behind (tokenizer, scheduler) is bounded by the number of slots.
A slot's own content is bounded because deltas not yet taken are joined, and tokens end at max_tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import trio

from ksana.errors import ServiceError
from ksana.messages.base import Message, RequestId
from ksana.messages.outputs import Ended, OutputEvent, PromptAccepted, TextDelta


class Slot:
    """The waiting output of one request, for one reader. `put` and `take` cost O(events put)."""

    def __init__(self, request_id: RequestId) -> None:
        self.request_id = request_id
        self.ended = False
        self._events: list[OutputEvent] = []
        self._wakeup = trio.Event()

    def put(self, event: OutputEvent) -> None:
        self._events.append(event)
        self.ended = self.ended or isinstance(event, Ended)
        self._wakeup.set()

    async def take(self) -> list[OutputEvent]:
        """Wait until there is something, then return all of it (never empty), neighbouring deltas joined.

        `Ended` is the last event ever.
        """
        while not self._events:
            self._wakeup = trio.Event()
            await self._wakeup.wait()
        events, self._events = self._events, []
        return join_deltas(events)


def join_deltas(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    """The same events with runs of text deltas of one choice made into one delta each."""
    joined: list[OutputEvent] = []
    run: list[TextDelta] = []
    for event in events:
        if isinstance(event, TextDelta):
            if run and run[0].choice_index != event.choice_index:
                joined.append(_join_run(run))
                run = []
            run.append(event)
        else:
            if run:
                joined.append(_join_run(run))
                run = []
            joined.append(event)
    if run:
        joined.append(_join_run(run))
    return joined


def _join_run(run: list[TextDelta]) -> TextDelta:
    if len(run) == 1:
        return run[0]
    return TextDelta(
        request_id=run[0].request_id,
        text="".join(delta.text for delta in run),
        token_ids=tuple(token_id for delta in run for token_id in delta.token_ids),
        choice_index=run[0].choice_index,
    )


class Slots:
    """All slots of an engine.

    Invariants: at most `capacity` slots are open or waiting for the ending of a request whose producer
    left; request ids are given out in increasing order, never twice.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_late_events = 0
        """Events for a slot whose producer left. Normal, counted."""
        self.num_refused = 0
        self._open: dict[RequestId, Slot] = {}
        self._left: set[RequestId] = set()
        """Requests whose producer left before they ended."""
        self._next_id: RequestId = 1
        self._on_end = trio.Event()

    def __len__(self) -> int:
        return len(self._open) + len(self._left)

    def open(self) -> Slot:
        """Take a slot. Raises ServiceError 429 when all are taken."""
        if len(self) >= self.capacity:
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
        self._open[slot.request_id] = slot
        return slot

    def close(self, slot: Slot) -> None:
        """The producer leaves. What still comes for the slot is dropped and counted, and until `Ended`
        comes it counts against the capacity. Closing twice is allowed."""
        if self._open.pop(slot.request_id, None) is not None and not slot.ended:
            self._left.add(slot.request_id)

    def discard(self, slot: Slot) -> None:
        """Give back a slot whose request nobody was ever told of."""
        self._open.pop(slot.request_id, None)

    def post(self, message: Message) -> None:
        """Deliver an output event to the slot of its request."""
        assert isinstance(message, PromptAccepted | TextDelta | Ended)
        slot = self._open.get(message.request_id)
        if slot is not None:
            if slot.ended:
                self.num_late_events += 1
            else:
                slot.put(message)
        else:
            self.num_late_events += 1
        if isinstance(message, Ended):
            self._left.discard(message.request_id)
            self._on_end.set()

    def unfinished(self) -> list[RequestId]:
        """Requests that have not ended, oldest first."""
        going_on = {request_id for request_id, slot in self._open.items() if not slot.ended}
        return sorted(going_on | self._left)

    async def wait_finished(self) -> None:
        """Wait until every request has ended, whether or not its output was taken."""
        while self.unfinished():
            self._on_end = trio.Event()
            await self._on_end.wait()
