"""The tap that writes the journal. What it takes is time of the event loop, so it only encodes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from ksana.journal.files import Piece
from ksana.journal.format import (
    CoreState,
    RecordedSettings,
    SegmentHeader,
    WrittenActivation,
)
from ksana.journal.redacted_states import redacted_state
from ksana.journal.redaction import Redaction
from ksana.journal.schema import schema_hash
from ksana.journal.segment_buffer import SegmentBuffer
from ksana.messages.base import Message
from ksana.messages.status import JournalStatus
from ksana.runtime.actor import Address, Recorder, Said

log = logging.getLogger(__name__)

MAX_UNWRITTEN_BYTES = 64 << 20
"""What may wait for a slow disk, besides the states of one segment; more ends the journal."""


class Snapshotting(Protocol):
    """A core whose whole state can be had between two activations."""

    def snapshot(self) -> Any: ...


Cores = Mapping[Address, Callable[[], Snapshotting]]
"""How to get at the cores of a generation."""


class JournalRecorder(Recorder):
    """Makes frames; whoever owns it takes them to the disk.

    Invariants: frames are whole; after `stop` there are none; a message that a redaction does not know
    ends the journal before it is written. Nothing is raised: a journal that fails is no reason for a
    request to fail.
    Cost: one encoding of each message, at the actor that says it or, if that is not recorded, at the one that
    hears it; see `benchmarks/journal_costs.py`.
    """

    def __init__(
        self,
        *,
        settings: RecordedSettings,
        model_fingerprint: str,
        actors: tuple[Address, ...],
        run: str,
        first_segment: int,
        segment_bytes: int,
        redaction: Redaction | None = None,
        wall_time_s: Callable[[], float] = time.time,
    ) -> None:
        """`actors` are recorded, others are ignored. A segment ends when it has `segment_bytes`, or as many
        bytes of activations as of states, whichever is later."""
        self.actors = actors
        self.stopped: str | None = None
        """Why nothing is recorded any more."""
        self._place = {actor: place for place, actor in enumerate(actors)}
        self._settings = settings
        self._model_fingerprint = model_fingerprint
        self._run = run
        self._segment_bytes = segment_bytes
        self._redaction = redaction
        self._wall_time_s = wall_time_s
        self._cores: Cores = {}
        self._generation = 0
        self._buffer = SegmentBuffer(first_segment - 1)
        self._num_activation_bytes = 0
        self._num_state_bytes = 0
        self._num_said = 0
        self._on_the_way: dict[tuple[Address, int], tuple[int, Message]] = {}
        """Said to a recorded actor and not heard yet, by receiver and identity: number, and the message,
        which keeps the identity from being given to another."""
        self.num_activations = 0

    # What the engine tells

    def begin(self, cores: Cores, now_s: float) -> None:
        """A generation begins, with fresh cores and empty mailboxes."""
        self.end()
        self._cores = cores
        self._generation += 1
        self._guarded(self._begin_segment, now_s)

    def __call__(
        self, actor: Address, now_s: float, messages: Sequence[Message], said: Sequence[Said]
    ) -> None:
        if self._redaction is not None and actor == "scheduler":
            self._guarded(self._see, said)
        if actor in self._place:
            self._guarded(self._record, actor, now_s, messages, said, "")

    def broke(self, actor: Address, now_s: float, messages: Sequence[Message], error: Exception) -> None:
        if actor in self._place:
            text = type(error).__name__ if self._redaction else f"{type(error).__name__}: {error}"
            self._guarded(self._record, actor, now_s, messages, (), text[:10_000])

    def end(self) -> None:
        """Nothing more will happen."""
        self._guarded(self._end_segment)

    def stop(self, reason: str) -> None:
        """Record nothing any more; what was not taken yet is dropped."""
        if self.stopped is None:
            log.error("the journal stops: %s; serving goes on", reason)
            self.stopped = reason
        self._buffer.drop()
        self._on_the_way, self._cores = {}, {}

    def take(self) -> list[Piece]:
        """What is to be written now, in order."""
        return self._buffer.take()

    def status(self) -> JournalStatus:
        return JournalStatus(
            num_activations=self.num_activations,
            num_bytes=self._buffer.num_bytes,
            segment=self._buffer.number,
            stopped=self.stopped,
        )

    def _see(self, said: Sequence[Said]) -> None:
        assert self._redaction is not None
        for _, message in said:
            self._redaction.see(message)

    # Frames

    def _guarded(self, do: Callable[..., None], *arguments: Any) -> None:
        if self.stopped is not None or not self._cores:
            return
        try:
            do(*arguments)
        except Exception as error:
            log.exception("a bug in the journal")
            self.stop(f"{type(error).__name__} while recording")

    def _record(
        self, actor: Address, now_s: float, messages: Sequence[Message], said: Sequence[Said], error: str
    ) -> None:
        numbers: list[int] = []
        in_full: list[Message] = []
        for message in messages:
            number, _ = self._on_the_way.pop((actor, id(message)), (0, message))
            numbers.append(number)
            if not number:
                in_full.append(message)
        for address, message in said:
            self._num_said += 1
            # What an actor says to itself goes to its shell.
            if address != actor and address in self._place:
                self._on_the_way.setdefault((address, id(message)), (self._num_said, message))
        written_in: list[Any] = in_full
        written_said: list[Any] = list(said)
        if self._redaction is not None:
            written_in = [self._redaction.message(message) for message in in_full]
            written_said = [(address, self._redaction.message(message)) for address, message in said]
        frame = WrittenActivation(self._place[actor], now_s, numbers, written_in, written_said, error)
        self._num_activation_bytes += self._buffer.write(frame)
        self.num_activations += 1
        of_activations, of_states = self._num_activation_bytes, self._num_state_bytes
        if of_activations + of_states >= self._segment_bytes and of_activations >= of_states:
            self._end_segment()
            self._begin_segment(now_s)
        elif self._buffer.num_bytes_of_segment > MAX_UNWRITTEN_BYTES:
            self.stop(f"{self._buffer.num_bytes_of_segment} bytes wait for the disk")

    def _begin_segment(self, now_s: float) -> None:
        self._buffer.begin()
        self._num_said = 0
        self._on_the_way.clear()
        self._num_activation_bytes = 0
        header = SegmentHeader(
            model_fingerprint=self._model_fingerprint,
            settings=self._settings,
            schema_hash=schema_hash(),
            run=self._run,
            segment=self._buffer.number,
            generation=self._generation,
            actors=self.actors,
            redacted=self._redaction is not None,
            now_s=now_s,
            wall_time_s=self._wall_time_s(),
        )
        self._num_state_bytes = self._buffer.write(header)
        for place, actor in enumerate(self.actors):
            snapshot = self._cores[actor]().snapshot()
            state = snapshot if isinstance(snapshot, bytes) else msgspec.msgpack.encode(snapshot)
            if self._redaction is not None:
                state = redacted_state(self._redaction, actor, state)
            self._num_state_bytes += self._buffer.write(CoreState(place, state))
        num_unwritten = self._buffer.num_unwritten_bytes
        if num_unwritten > MAX_UNWRITTEN_BYTES + self._num_state_bytes:
            self.stop(f"{num_unwritten} bytes wait for the disk")

    def _end_segment(self) -> None:
        self._buffer.end()
