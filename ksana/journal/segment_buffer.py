"""Frames on their way to the disk."""

from __future__ import annotations

from typing import Any

import msgspec

from ksana.journal.files import Piece
from ksana.journal.format import SegmentEnd
from ksana.runtime.frames import encode_frame


class SegmentBuffer:
    """Encodes frames and keeps them, by segment, until they are taken. Invariant: what is taken are whole
    frames, in order."""

    def __init__(self, number: int) -> None:
        """`number`: of the last segment there is."""
        self.number = number
        self.num_bytes = 0
        """Of all frames there ever were."""
        self._encoder = msgspec.msgpack.Encoder()
        self._pieces: list[Piece] = []
        self._buffer = bytearray()
        self._num_frames = 0

    @property
    def num_bytes_of_segment(self) -> int:
        """Not taken yet, of the segment that is being written."""
        return len(self._buffer)

    @property
    def num_unwritten_bytes(self) -> int:
        """Not taken yet, of all segments."""
        return len(self._buffer) + sum(len(piece.data) for piece in self._pieces)

    def begin(self) -> None:
        """What comes belongs to the next segment."""
        self._cut()
        self.number += 1
        self._num_frames = 0

    def write(self, frame: Any) -> int:
        """Returns the number of bytes."""
        data = encode_frame(self._encoder.encode(frame), with_crc=True)
        self._buffer += data
        self._num_frames += 1
        self.num_bytes += len(data)
        return len(data)

    def end(self) -> None:
        """The segment is whole."""
        self.write(SegmentEnd(self._num_frames))

    def take(self) -> list[Piece]:
        """What is to be written now, in order."""
        self._cut()
        pieces, self._pieces = self._pieces, []
        return pieces

    def drop(self) -> None:
        """Forget what was not taken."""
        self._pieces, self._buffer = [], bytearray()

    def _cut(self) -> None:
        if self._buffer:
            self._pieces.append(Piece(self.number, bytes(self._buffer)))
            self._buffer = bytearray()
