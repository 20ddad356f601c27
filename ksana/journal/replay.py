"""Feeding recorded activations to real cores, and holding what they say against what was said."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ksana.journal.activations import Heard, SegmentReader, State
from ksana.journal.cores import RestoredCore, decode_state, restore_core
from ksana.journal.reading import JournalError, Segment, missing_before
from ksana.messages.base import Message
from ksana.runtime.actor import Address, Said
from ksana.tokenizers.prompts import PromptEncoder

MAX_ERROR_CHARS = 10_000
"""Of what a core raised, recorded and compared."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first thing that a core did otherwise than it was recorded."""

    segment: int
    offset: int
    """Of the activation's frame in the file, bytes."""
    activation: int
    """Its number in the segment, from 1; 0: the state at the segment's start."""
    actor: Address
    now_s: float
    messages: tuple[Message, ...]
    """What the core was told."""
    what: str
    """In words, without the messages."""
    recorded: str = ""
    replayed: str = ""


class ReplayReport(msgspec.Struct, kw_only=True):
    """What was replayed. Everything was the same if `difference` is None."""

    num_segments: int = 0
    num_activations: int = 0
    num_messages: int = 0
    """Said, and compared."""
    by_actor: dict[str, int] = {}
    """Activations."""
    notes: list[str] = []
    difference: Difference | None = None


def replay(
    segments: Sequence[Segment],
    actors: Sequence[Address],
    encoder: PromptEncoder | None = None,
    progress: Callable[[Segment], None] = lambda _segment: None,
) -> ReplayReport:
    """Replay these actors through these segments, up to the first difference.

    Each segment begins with its own states; where it goes on from the one before, the states at which that
    one has arrived must be these. Raises JournalError for a journal that is damaged.
    """
    report = ReplayReport()
    before: _SegmentReplay | None = None
    for place, segment in enumerate(segments):
        progress(segment)
        if before is not None and (gap := missing_before(segment, before.segment)) is not None:
            report.notes.append(gap)
        running = _SegmentReplay(segment, actors, encoder, report)
        try:
            report.difference = running.run(before)
        except JournalError as error:
            raise JournalError(f"{error}; {_before(report)}") from None
        if report.difference is not None:
            return report
        report.num_segments += 1
        note = running.reader.tail.in_words()
        if note is not None:
            is_last = segment is segments[-1] or segments[place + 1].header.run != segment.header.run
            if not is_last:
                raise JournalError(
                    f"{segment.path}: damaged: it {note}, but the process went on; {_before(report)}"
                )
            report.notes.append(f"segment {segment.number} {note}")
        before = running
    return report


def _before(report: ReplayReport) -> str:
    return f"before that, {report.num_activations} activations replayed, and were the same"


class _Different(Exception):
    def __init__(self, what: str, recorded: object = "", replayed: object = "") -> None:
        super().__init__(what)
        self.what, self.recorded, self.replayed = what, _shown(recorded), _shown(replayed)


class _SegmentReplay:
    """One segment."""

    def __init__(
        self, segment: Segment, actors: Sequence[Address], encoder: PromptEncoder | None, report: ReplayReport
    ) -> None:
        self.segment = segment
        self.reader = SegmentReader(segment, actors)
        self.cores: dict[Address, RestoredCore] = {}
        self._encoder = encoder
        self._report = report
        self._encode = msgspec.msgpack.Encoder().encode

    def run(self, before: _SegmentReplay | None) -> Difference | None:
        """Replay it; `before` is what was replayed before it, to its end."""
        for one in self.reader.read():
            try:
                if isinstance(one, State):
                    self._restore(one, before)
                else:
                    self._activate(one)
            except _Different as different:
                heard = one if isinstance(one, Heard) else None
                return Difference(
                    segment=self.segment.number,
                    offset=one.offset,
                    activation=heard.number if heard else 0,
                    actor=one.actor,
                    now_s=heard.now_s if heard else self.segment.header.now_s,
                    messages=heard.messages if heard else (),
                    what=different.what,
                    recorded=different.recorded,
                    replayed=different.replayed,
                )
        return None

    # States

    def _restore(self, one: State, before: _SegmentReplay | None) -> None:
        actor = one.actor
        settings = self.segment.header.settings
        self.cores[actor] = restore_core(actor, settings, one.state, self._encoder)
        if before is None or actor not in before.cores or not self._goes_on_from(before):
            return
        arrived = before.cores[actor]
        if actor != before.reader.last:
            self._next_timer_s(arrived)  # as its shell did when it began to wait
        if arrived.state() != decode_state(actor, one.state):
            raise _Different(f"the state at the end of segment {before.segment.number} is another one")

    def _goes_on_from(self, before: _SegmentReplay) -> bool:
        earlier, here = before.segment.header, self.segment.header
        return before.reader.tail.is_complete and (
            (earlier.run, earlier.generation, earlier.segment + 1)
            == (here.run, here.generation, here.segment)
        )

    # Activations

    def _activate(self, one: Heard) -> None:
        core = self.cores.get(one.actor)
        if core is None:
            raise self.reader.damaged(one.offset, f"no state of the {one.actor}")
        self._report.num_activations += 1
        self._report.by_actor[one.actor] = self._report.by_actor.get(one.actor, 0) + 1
        timer_s = self._next_timer_s(core)
        if not one.messages and not one.error and (timer_s is None or timer_s > one.now_s):
            raise _Different(f"a timer was due at {one.now_s}", "a timer", f"the next is at {timer_s}")
        said: list[Said] = []
        error = ""
        try:
            said = core.handle(one.now_s, one.messages)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"[:MAX_ERROR_CHARS]
        self._compare_errors(one, error)
        self._compare_said(one, said)

    def _next_timer_s(self, core: RestoredCore) -> float | None:
        try:
            return core.next_timer_s()
        except Exception as raised:  # in a state that no core was ever in
            error = f"{type(raised).__name__}: {raised}"[:MAX_ERROR_CHARS]
            raise _Different("the core cannot tell its next timer", "no error", error) from None

    def _compare_errors(self, one: Heard, error: str) -> None:
        # A redacted journal has only the name of an error.
        if one.error not in (error, error.partition(":")[0]):
            raise _Different("the core raised, or did not", one.error or "no error", error or "no error")
        if error:
            where = f"segment {self.segment.number}, byte {one.offset}"
            self._report.notes.append(f"{where}: the {one.actor} raised, as recorded: {error}")

    def _compare_said(self, one: Heard, said: list[Said]) -> None:
        """Byte by byte, which tells 1 from 1.0 as well."""
        counts = f"{len(one.said)} messages were said, now {len(said)}"
        for place, (address, raw) in enumerate(one.said):
            if place >= len(said):
                raise _Different(counts, (address, self.reader.message(raw, one.offset)), "nothing more")
            now_address, now_message = said[place]
            if address != now_address or bytes(raw) != self._encode(now_message):
                recorded = (address, self.reader.message(raw, one.offset))
                raise _Different(f"message {place + 1} of {len(one.said)}", recorded, said[place])
            self._report.num_messages += 1
        if len(said) > len(one.said):
            raise _Different(counts, "nothing more", said[len(one.said)])


def _shown(value: object) -> str:
    """A said message in words, or a text as it is."""
    if isinstance(value, tuple):
        address, message = value
        return f"to {address}: {message}"
    return str(value)
