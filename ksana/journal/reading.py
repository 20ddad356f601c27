"""Reading segments: every frame is checked, and nothing that a file says is believed before."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ksana.errors import KsanaError
from ksana.journal.cut_off import was_cut_off
from ksana.journal.format import (
    FORMAT,
    RUN_NAME,
    SEGMENT_NAME,
    UNREADABLE,
    VERSION,
    Frame,
    SegmentEnd,
    SegmentHeader,
)
from ksana.journal.schema import STATE_TYPES, schema_hash
from ksana.messages.base import SCHEMA_VERSION
from ksana.runtime.frames import LENGTH_AND_CRC, MAX_FRAME_BYTES, Header
from ksana.shown import shown

MAX_HEADER_BYTES = 1 << 20

log = logging.getLogger(__name__)


class JournalError(KsanaError):
    """A journal that cannot be read: there is none, it is damaged, or another Ksana wrote it."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Segment:
    """A file of a journal, whose header was read and checked."""

    path: Path
    number: int
    header: SegmentHeader


@dataclass(slots=True)
class Tail:
    """How a segment ends, once all frames were read."""

    is_complete: bool = False
    """The writer has said that nothing is missing."""
    num_cut_bytes: int = 0
    """Of a last frame that is not whole."""

    def in_words(self) -> str | None:
        """What is to be told of it, if anything."""
        if self.is_complete:
            return None
        cut = f", and its last {self.num_cut_bytes} bytes are no whole frame" if self.num_cut_bytes else ""
        return f"ends without an end{cut}: the process was killed, its disk failed, or it still writes"


def list_segments(directory: Path, tell: Callable[[str], None] = log.warning) -> list[Segment]:
    """The segments in a directory, in order. Raises JournalError for one whose header cannot be used.

    `tell` hears of what is left out although nothing is damaged: the first segments, which are deleted when
    there is no room; files without a whole header, as a killed process leaves its last; other files.
    """
    numbers = _segment_files(directory, tell)
    segments: list[Segment] = []
    headless: list[Path] = []  # the last ones: killed, or the disk full, while they were being begun
    cut: list[Path] = []
    for number, name in numbers:
        path = directory / name
        header = _read_header(path)
        if header is None:
            headless.append(path)
            cut.append(path)
            continue
        if header.segment != number:
            raise JournalError(f"{path} is segment {header.segment} under another name")
        if headless and segments and segments[-1].header.run == header.run:
            raise JournalError(f"{headless[0]}: damaged: it has no whole header, but the process went on")
        headless.clear()
        segments.append(Segment(path, number, header))
    if not segments:
        raise JournalError(
            f"there is no whole segment in {directory}: "
            f"the {_size(cut[0])} bytes of {cut[0].name} are no whole header"
        )
    first = numbers[0][0]
    if first > 1:
        which = "segment 1 is" if first == 2 else f"segments 1 to {first - 1} are"
        tell(f"{which} not there: the journal begins with segment {first}")
    for path in cut:
        tell(
            f"{path.name} is left out: its {_size(path)} bytes are no whole header, so nothing of it can be "
            "replayed; the process was killed, or its disk full, while it was being begun"
        )
    return segments


def _segment_files(directory: Path, tell: Callable[[str], None]) -> list[tuple[int, str]]:
    """Numbers and names. Raises JournalError if there is none, or one is no regular file: a pipe would be
    waited for, and a link may lead anywhere."""
    try:
        with os.scandir(directory) as entries:
            found = {entry.name: entry.is_file(follow_symlinks=False) for entry in entries}
    except OSError as error:
        raise JournalError(f"the journal {directory} cannot be read: {error.strerror}") from None
    numbers = []
    for name, is_file in sorted(found.items()):
        match = SEGMENT_NAME.fullmatch(name)
        if match is None:
            if name.startswith("segment") or name.endswith(".ksj"):
                tell(f"{shown(name)} is left out: its name is not segment-NNNNNNNN.ksj")
        elif not is_file:
            raise JournalError(
                f"{directory / name} is no regular file, where a segment of the journal belongs"
            )
        else:
            numbers.append((int(match[1]), name))
    if not numbers:
        raise JournalError(f"there is no journal in {directory}: no segment-NNNNNNNN.ksj")
    return sorted(numbers)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror}") from None


def missing_before(segment: Segment, before: Segment) -> str | None:
    """What is to be told if segments between these two of a list are not there."""
    first, last = before.number + 1, segment.number - 1
    if first > last:
        return None
    if first == last:
        return f"segment {first} is not there, or without a whole header"
    return f"segments {first} to {last} are not there, or without whole headers"


def read_frames(segment: Segment, tail: Tail) -> Iterator[tuple[int, Frame]]:
    """(offset, frame) of every whole frame behind the header; then `tail` is filled in.

    Raises JournalError, with the offset, for one that is damaged. Memory: one frame.
    """
    decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)
    num_frames = 0
    for offset, payload in _payloads(segment.path, tail):
        num_frames += 1
        if num_frames == 1:
            continue
        if tail.is_complete:
            raise JournalError(f"{segment.path}: damaged at byte {offset}: a frame after the end")
        try:
            frame = decoder.decode(payload)
        except UNREADABLE as error:
            raise JournalError(f"{segment.path}: damaged at byte {offset}: no frame ({error})") from None
        if isinstance(frame, SegmentEnd):
            if frame.num_frames != num_frames - 1:
                raise JournalError(
                    f"{segment.path}: damaged: {num_frames - 1} frames of {frame.num_frames} are there"
                )
            tail.is_complete = True
        else:
            yield offset, frame
    if tail.is_complete and tail.num_cut_bytes:
        raise JournalError(f"{segment.path}: damaged: {tail.num_cut_bytes} bytes follow the end")


def _read_header(path: Path) -> SegmentHeader | None:
    """The first frame; None if it is not whole. Raises JournalError."""
    first = next(_payloads(path, Tail(), MAX_HEADER_BYTES), None)
    if first is None:
        return None
    try:
        plain = msgspec.msgpack.decode(first[1], type=Header)
        if plain.format != FORMAT:
            raise JournalError(f"{path} is no segment of a journal")
        if plain.version != SCHEMA_VERSION:
            raise JournalError(f"{path}: messages of version {plain.version}, here they are {SCHEMA_VERSION}")
        header = msgspec.msgpack.decode(first[1], type=SegmentHeader)
    except UNREADABLE as error:
        raise JournalError(f"{path}: the header cannot be read ({error})") from None
    if header.journal_version != VERSION:
        raise JournalError(f"{path}: a journal of version {header.journal_version}, this reads {VERSION}")
    if header.schema_hash != schema_hash():
        raise JournalError(
            f"{path} was written by a Ksana whose messages or states differ: replay it with that one"
        )
    actors = header.actors
    if not (set(actors) <= STATE_TYPES.keys() and len(set(actors)) == len(actors)):
        raise JournalError(f"{path}: the header names actors that cannot be recorded, or one twice")
    if RUN_NAME.fullmatch(header.run) is None:
        raise JournalError(f"{path}: the header has no name of a run")
    return header


def _payloads(path: Path, tail: Tail, max_bytes: int = MAX_FRAME_BYTES) -> Iterator[tuple[int, bytes]]:
    """(offset, payload) of each frame of a file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            offset = 0
            while offset < size:
                head = file.read(LENGTH_AND_CRC.size)
                left = size - offset - LENGTH_AND_CRC.size
                if len(head) == LENGTH_AND_CRC.size:
                    length, crc = LENGTH_AND_CRC.unpack(head)
                    if length > max_bytes:  # none was ever written: what is cut off has a length that can be
                        raise JournalError(
                            f"{path}: damaged at byte {offset}: the length of a frame is wrong: "
                            f"{length} bytes, of {max_bytes} at most"
                        )
                    if length <= left:
                        payload = file.read(length)
                        if zlib.crc32(payload) != crc:
                            raise JournalError(f"{path}: damaged at byte {offset}: the checksum is wrong")
                        yield offset, payload
                        offset += LENGTH_AND_CRC.size + length
                        continue
                if left > 0 and not was_cut_off(file, offset, size):
                    raise JournalError(f"{path}: damaged at byte {offset}: the length of a frame is wrong")
                tail.num_cut_bytes = size - offset
                return
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror}") from None
