"""Activations as they were: what is said between recorded actors is written once, and found again here."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from ksana.journal.format import UNREADABLE, Activation, CoreState
from ksana.journal.reading import JournalError, Segment, Tail, read_frames
from ksana.journal.schema import message_decoder
from ksana.messages.base import Message
from ksana.runtime.actor import Address


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """One activation, with the messages that the actor was told."""

    actor: Address
    number: int
    """Of the activation in its segment, from 1."""
    offset: int
    """Of its frame in the file, bytes."""
    now_s: float
    messages: tuple[Message, ...]
    said: list[tuple[Address, msgspec.Raw]]
    """As recorded: to be compared, or read by `SegmentReader.message`."""
    error: str


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot, as recorded at the start of the segment."""

    actor: Address
    offset: int
    state: bytes


class SegmentReader:
    """Reads one segment for some of its actors. Messages said to these are kept until they hear them."""

    def __init__(self, segment: Segment, actors: Collection[Address]) -> None:
        self.segment = segment
        self.tail = Tail()
        self.last: Address | None = None
        """Whose activation was the last, of all that were recorded."""
        self._actors = frozenset(actors)
        self._on_the_way: dict[int, msgspec.Raw] = {}
        self._num_said = 0

    def read(self) -> Iterator[State | Heard]:
        """States, then activations, in order. Raises JournalError for what is damaged."""
        number = 0
        with_state: set[Address] = set()
        for offset, frame in read_frames(self.segment, self.tail):
            if isinstance(frame, CoreState):
                actor = self._actor(frame.actor, offset)
                if number or actor in with_state:
                    raise self.damaged(offset, f"a state of the {actor} where none belongs")
                with_state.add(actor)
                if actor in self._actors:
                    yield State(actor=actor, offset=offset, state=frame.state)
            elif isinstance(frame, Activation):
                number += 1
                actor = self.last = self._actor(frame.actor, offset)
                messages = self._messages(frame, actor, offset)
                self._keep_said(frame, actor)
                if actor in self._actors:
                    yield Heard(
                        actor=actor,
                        number=number,
                        offset=offset,
                        now_s=frame.now_s,
                        messages=messages,
                        said=frame.said,
                        error=frame.error,
                    )

    def message(self, raw: msgspec.Raw, offset: int) -> Message:
        """A message of the frame at `offset`. Raises JournalError if it is none."""
        try:
            return message_decoder().decode(raw)
        except UNREADABLE as error:
            raise self.damaged(offset, f"no message ({error})") from None

    def damaged(self, offset: int, what: str) -> JournalError:
        return JournalError(f"{self.segment.path}: damaged at byte {offset}: {what}")

    def _messages(self, frame: Activation, actor: Address, offset: int) -> tuple[Message, ...]:
        """What the actor was told, in order: said before in this segment, or written here."""
        if actor not in self._actors:
            return ()
        in_full = iter(frame.messages)
        messages = []
        for number in frame.numbers:
            raw = self._on_the_way.pop(number, None) if number else next(in_full, None)
            if raw is None:
                raise self.damaged(offset, f"message {number} was not said before")
            messages.append(self.message(raw, offset))
        if next(in_full, None) is not None:
            raise self.damaged(offset, "a message that nobody was told")
        return tuple(messages)

    def _keep_said(self, frame: Activation, actor: Address) -> None:
        for address, said in frame.said:
            self._num_said += 1
            if address != actor and address in self._actors:
                self._on_the_way[self._num_said] = said

    def _actor(self, place: int, offset: int) -> Address:
        actors = self.segment.header.actors
        if not 0 <= place < len(actors):
            raise self.damaged(offset, f"there is no actor {place}")
        return actors[place]
