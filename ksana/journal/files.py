"""The files of a journal that is being written: one segment after the other, the oldest deleted in time."""

from __future__ import annotations

import errno
import fcntl
import io
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ksana.errors import ConfigError
from ksana.journal.format import MAX_SEGMENTS, SEGMENT_NAME, segment_name
from ksana.private_files import exposure, make_private_directories, open_private

log = logging.getLogger(__name__)

LOCK_NAME = "lock"


class Piece(msgspec.Struct, frozen=True):
    """Bytes for one segment. Numbers never fall; a higher one ends the segment before."""

    segment: int
    data: bytes


class SegmentFiles:
    """Invariants: one process at a time writes to a directory; before anything is written the oldest segments
    are deleted, so that all together never take more than `max_bytes`; the newest one is never deleted.

    Every method may block, and may be called from any thread.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """Makes the directory if need be, for its owner alone as all files in it, and locks it. Raises
        ConfigError."""
        self.directory = directory
        self._max_bytes = max_bytes
        self._guard = threading.Lock()
        self._file: io.FileIO | None = None
        self._number = 0
        try:
            make_private_directories(directory)
            self._lock = open_private(directory / LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise ConfigError(f"the journal {directory} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._sizes = _segment_sizes(directory)
        except OSError as error:
            os.close(self._lock)
            in_use = isinstance(error, BlockingIOError)
            reason = "another process writes its journal there" if in_use else error.strerror
            raise ConfigError(f"the journal {directory} cannot be written: {reason}") from None
        exposed = exposure(directory)
        if exposed is not None:
            log.warning(
                "the journal %s %s, and prompts are in it unless it is redacted: `chmod 700` it, or name "
                "another directory",
                directory,
                exposed,
            )
        if self.next_number > MAX_SEGMENTS - MAX_SEGMENTS // 10:
            os.close(self._lock)
            raise ConfigError(f"the journal {directory} has no numbers left: take another directory")

    @property
    def next_number(self) -> int:
        """Higher than that of any segment there is or was in this run."""
        return max(self._number, max(self._sizes, default=0)) + 1

    def write(self, pieces: Sequence[Piece]) -> None:
        """Append. Raises OSError, such as for a disk that is full, or if the newest segment alone is to have
        more than `max_bytes`; what was written so far stays."""
        with self._guard:
            for piece in pieces:
                if piece.segment != self._number or self._file is None:
                    self._open(piece.segment)
                assert self._file is not None
                self._make_room(len(piece.data))
                view = memoryview(piece.data)
                while view:
                    num_bytes = self._file.write(view)
                    self._sizes[self._number] += num_bytes
                    view = view[num_bytes:]

    def close(self) -> None:
        """Close the segment and unlock the directory."""
        with self._guard:
            if self._file is not None:
                self._file.close()
                self._file = None
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    def _open(self, number: int) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        descriptor = open_private(self.directory / segment_name(number), flags)
        self._file = io.FileIO(descriptor, "wb")
        self._number = number
        self._sizes[number] = 0

    def _make_room(self, num_bytes: int) -> None:
        total = sum(self._sizes.values()) + num_bytes
        for number in sorted(self._sizes):
            if total <= self._max_bytes:
                return
            if number != self._number:
                (self.directory / segment_name(number)).unlink(missing_ok=True)
                total -= self._sizes.pop(number)
        if total > self._max_bytes:
            raise OSError(errno.EFBIG, f"one segment has more than all may have, {self._max_bytes} bytes")


def _segment_sizes(directory: Path) -> dict[int, int]:
    """Bytes of the segments in a directory, by number. What is no regular file is none."""
    sizes = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            match = SEGMENT_NAME.fullmatch(entry.name)
            if match is not None and entry.is_file(follow_symlinks=False):
                sizes[int(match[1])] = entry.stat(follow_symlinks=False).st_size
    return sizes
