"""What the engine says about all prompts of one HTTP request, for one reader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import trio

from ksana.client import OutputStream
from ksana.errors import ServiceError
from ksana.gateway.errors import ApiError, error_of
from ksana.messages.outputs import Ended, OutputEvent, PromptAccepted

Indexed = tuple[int, OutputEvent]
"""Index of the prompt, and an event about it."""

Observe = Callable[[int, OutputEvent], None]


class Outputs:
    """Merged events of one or more streams.

    One stream is read directly; several are read by one task each in `nursery`, which must outlive this.
    Whoever stops reading calls `close`, which aborts what has not ended; it never waits.
    """

    def __init__(
        self, streams: Sequence[OutputStream], nursery: trio.Nursery, observe: Observe, deadline_s: float
    ) -> None:
        self._streams = streams
        self._observe = observe
        self._deadline_s = deadline_s
        self._waiting = trio.CancelScope()
        self._error: ApiError | None = None
        self._ready: list[Indexed] = []
        self._wakeup = trio.Event()
        self.num_open = len(streams)
        """Prompts that have not ended yet, as far as the reader knows."""
        if len(streams) > 1:
            for index, stream in enumerate(streams):
                nursery.start_soon(partial(self._pump, index, stream))

    async def take(self) -> list[Indexed]:
        """Wait until there is something, then return all of it (never empty).

        Raises ServiceError when `end` was called, and 504 when the engine keeps silent past the deadline.
        """
        with trio.CancelScope(deadline=self._deadline_s) as self._waiting:
            if self._error is None:
                events = await (self._take_one() if len(self._streams) == 1 else self._take_merged())
        if self._error is not None:
            raise self._error
        if self._waiting.cancelled_caught:
            raise ServiceError(
                "the request was not done in time", status=504, code="timeout", type="timeout_error"
            )
        for index, event in events:
            self._observe(index, event)
            self.num_open -= isinstance(event, Ended)
        return events

    async def first(self) -> list[Indexed]:
        """The events up to where the HTTP status is known: no prompt was refused, and one has output.

        Raises the error of the first prompt that failed.
        """
        events: list[Indexed] = []
        unheard = set(range(len(self._streams)))
        has_output = False
        while unheard or not has_output:
            for index, event in await self.take():
                events.append((index, event))
                unheard.discard(index)
                if isinstance(event, Ended) and (error := error_of(event.outcome)) is not None:
                    raise error
                has_output = has_output or not isinstance(event, PromptAccepted)
        return events

    def end(self, error: ApiError) -> None:
        """Make the reader get `error` now or at its next `take`."""
        self._error = error
        self._waiting.cancel()

    def close(self) -> None:
        """Stop listening to all of it. May be called twice."""
        for stream in self._streams:
            stream.close()

    async def _take_one(self) -> list[Indexed]:
        events = await self._streams[0].take()
        if not events:
            raise ServiceError("the engine ended a request without saying how")
        return [(0, event) for event in events]

    async def _take_merged(self) -> list[Indexed]:
        while not self._ready:
            self._wakeup = trio.Event()
            await self._wakeup.wait()
        events, self._ready = self._ready, []
        return events

    async def _pump(self, index: int, stream: OutputStream) -> None:
        while events := await stream.take():
            self._ready += [(index, event) for event in events]
            self._wakeup.set()
