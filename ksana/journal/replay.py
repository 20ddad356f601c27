"""Feeding recorded activations to real cores, and holding what they say against what was said."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from ksana.journal.cores import RestoredCore, decode_state, restore_core
from ksana.journal.format import Activation, CoreState
from ksana.journal.reading import JournalError, Segment, Tail, read_frames
from ksana.journal.schema import message_decoder
from ksana.messages.base import Message
from ksana.runtime.actor import Address, Said
from ksana.tokenizers.prompts import PromptEncoder


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first thing that a core did otherwise than it was recorded."""

    segment: int
    offset: int
    """Of the activation's frame in the file, bytes."""
    activation: int
    """Its number in the segment, from 1."""
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


class _Different(Exception):
    def __init__(self, what: str, recorded: object = "", replayed: object = "") -> None:
        super().__init__(what)
        self.what, self.recorded, self.replayed = what, _shown(recorded), _shown(replayed)


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
        running = _SegmentReplay(segment, actors, encoder, report)
        for _ in running.activations(before):
            if report.difference is not None:
                return report
        report.num_segments += 1
        note = running.tail.in_words()
        if note is not None:
            is_last = segment is segments[-1] or segments[place + 1].header.run != segment.header.run
            if not is_last:
                raise JournalError(f"{segment.path}: damaged: it {note}, but the process went on")
            report.notes.append(f"segment {segment.number} {note}")
        before = running
    return report


class _SegmentReplay:
    """One segment. Messages said to recorded actors are kept until these hear them."""

    def __init__(
        self, segment: Segment, actors: Sequence[Address], encoder: PromptEncoder | None, report: ReplayReport
    ) -> None:
        self.segment = segment
        self.tail = Tail()
        self.cores: dict[Address, RestoredCore] = {}
        self.last: Address | None = None
        """Whose activation was the last, replayed or not."""
        self._actors = [actor for actor in segment.header.actors if actor in actors]
        self._encoder = encoder
        self._report = report
        self._on_the_way: dict[int, msgspec.Raw] = {}
        self._num_said = 0
        self._num_activations = 0
        self._encode = msgspec.msgpack.Encoder().encode

    def activations(self, before: _SegmentReplay | None) -> Iterator[Activation]:
        """Replay one after the other. Stops after one that was different, told in the report."""
        for offset, frame in read_frames(self.segment, self.tail):
            if isinstance(frame, CoreState):
                self._restore(frame, before, offset)
                if self._report.difference is not None:
                    yield Activation(frame.actor, self.segment.header.now_s, [], [], [])
            elif isinstance(frame, Activation):
                self._num_activations += 1
                self._activate(frame, offset)
                yield frame

    # States

    def _restore(self, frame: CoreState, before: _SegmentReplay | None, offset: int) -> None:
        actor = self._actor(frame.actor, offset)
        if actor not in self._actors:
            return
        header = self.segment.header
        self.cores[actor] = restore_core(actor, header.settings, frame.state, self._encoder)
        if before is None or actor not in before.cores or not before.tail.is_complete:
            return
        earlier = before.segment.header
        if (earlier.run, earlier.generation, earlier.segment + 1) != (
            header.run,
            header.generation,
            header.segment,
        ):
            return
        arrived = before.cores[actor]
        if actor != before.last:
            arrived.next_timer_s()  # as its shell did when it began to wait
        if arrived.state() != decode_state(actor, frame.state):
            self._report.difference = Difference(
                segment=self.segment.number,
                offset=offset,
                activation=0,
                actor=actor,
                now_s=header.now_s,
                messages=(),
                what=f"the state at the end of segment {before.segment.number} is not the recorded one",
            )

    # Activations

    def _activate(self, frame: Activation, offset: int) -> None:
        actor = self.last = self._actor(frame.actor, offset)
        raw = self._heard(frame, offset)
        for address, said in frame.said:
            self._num_said += 1
            if address != actor and address in self._actors:
                self._on_the_way[self._num_said] = said
        if actor not in self._actors:
            return
        core = self.cores.get(actor)
        if core is None:
            raise JournalError(f"{self.segment.path}: damaged at byte {offset}: no state of the {actor}")
        messages = tuple(self._message(one, offset) for one in raw)
        self._report.num_activations += 1
        self._report.by_actor[actor] = self._report.by_actor.get(actor, 0) + 1
        try:
            self._compare(core, frame, messages, offset)
        except _Different as different:
            self._report.difference = Difference(
                segment=self.segment.number,
                offset=offset,
                activation=self._num_activations,
                actor=actor,
                now_s=frame.now_s,
                messages=messages,
                what=different.what,
                recorded=different.recorded,
                replayed=different.replayed,
            )

    def _compare(
        self, core: RestoredCore, frame: Activation, messages: tuple[Message, ...], offset: int
    ) -> None:
        timer_s = core.next_timer_s()
        if not messages and not frame.error and (timer_s is None or timer_s > frame.now_s):
            raise _Different(f"a timer was due at {frame.now_s}", "a timer", f"the next is at {timer_s}")
        said: list[Said] = []
        error = ""
        try:
            said = list(core.handle(frame.now_s, messages))
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"[:10_000]
        # A redacted journal has only the name of an error.
        if error != frame.error and error.partition(":")[0] != frame.error:
            raise _Different("the core raised, or did not", frame.error or "no error", error or "no error")
        if error:
            text = f"segment {self.segment.number}, byte {offset}: raised, as recorded: {error}"
            self._report.notes.append(text)
        for place, (address, recorded) in enumerate(frame.said):
            if place >= len(said):
                raise _Different(
                    f"{len(frame.said)} messages were said, {len(said)} are now",
                    (address, self._message(recorded, offset)),
                    "nothing more",
                )
            now_address, now_message = said[place]
            if address != now_address or bytes(recorded) != self._encode(now_message):
                raise _Different(
                    f"message {place + 1} of {len(frame.said)}",
                    (address, self._message(recorded, offset)),
                    said[place],
                )
            self._report.num_messages += 1
        if len(said) > len(frame.said):
            raise _Different(
                f"{len(frame.said)} messages were said, {len(said)} are now",
                "nothing more",
                said[len(frame.said)],
            )

    def _heard(self, frame: Activation, offset: int) -> list[msgspec.Raw]:
        """What the actor was told, in order; said before in this segment, or written here."""
        heard: list[msgspec.Raw] = []
        in_full = iter(frame.messages)
        is_replayed = self.segment.header.actors[frame.actor] in self._actors
        for number in frame.numbers:
            one = next(in_full, None) if not number else self._on_the_way.pop(number, None)
            if one is None and (is_replayed or not number):
                raise JournalError(
                    f"{self.segment.path}: damaged at byte {offset}: message {number} was not said before"
                )
            if one is not None:
                heard.append(one)
        return heard

    def _message(self, raw: msgspec.Raw, offset: int) -> Message:
        try:
            return message_decoder().decode(raw)
        except msgspec.MsgspecError as error:
            raise JournalError(
                f"{self.segment.path}: damaged at byte {offset}: no message ({error})"
            ) from None

    def _actor(self, place: int, offset: int) -> Address:
        actors = self.segment.header.actors
        if not 0 <= place < len(actors):
            raise JournalError(f"{self.segment.path}: damaged at byte {offset}: there is no actor {place}")
        return actors[place]


def _shown(value: object) -> str:
    """A said message in words, or a text as it is."""
    if isinstance(value, tuple):
        address, message = value
        return f"to {address}: {message}"
    return str(value)
