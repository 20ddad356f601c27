"""Frames: how messages travel over sockets and lie in files.

    frame            u32 little-endian length of the payload, payload
    frame in a file  u32 little-endian length of the payload, u32 CRC-32 of the payload, payload

The payload is msgpack. The first frame is a `Header`. Nothing here does I/O: bytes in, payloads out.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec

from ksana.errors import KsanaError
from ksana.messages.base import SCHEMA_VERSION

MAX_FRAME_BYTES = 256 << 20
"""Longest payload taken: a plan of 4,096 resumed rows of 8,192 tokens is about 170 MB."""

_LENGTH = struct.Struct("<I")
LENGTH_AND_CRC = struct.Struct("<II")
"""What stands before the payload in a file."""


class FrameError(KsanaError):
    """The bytes are not frames of ours: too long, cut off, damaged, or of another format or version."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame of every stream and file: what follows, and whether the two sides fit together."""

    format: str
    """For instance "ksana.worker"."""
    version: int = SCHEMA_VERSION
    model_fingerprint: str = ""
    settings: dict[str, Any] = {}

    def check(self, format: str) -> None:
        """Raise FrameError unless this is a stream of that format in the version spoken here."""
        if self.format != format or self.version != SCHEMA_VERSION:
            raise FrameError(
                f"the stream is {self.format!r} version {self.version}, "
                f"not {format!r} version {SCHEMA_VERSION}: both sides must be the same Ksana"
            )


def encode_frame(payload: bytes, *, with_crc: bool = False, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """One frame around a payload. Raises FrameError when the payload is longer than `max_bytes`."""
    if len(payload) > max_bytes:
        raise FrameError(f"a frame of {len(payload)} bytes is longer than the {max_bytes} allowed")
    if with_crc:
        return LENGTH_AND_CRC.pack(len(payload), zlib.crc32(payload)) + payload
    return _LENGTH.pack(len(payload)) + payload


class FrameDecoder:
    """Cuts a stream of bytes, fed in pieces of any size, into payloads.

    Memory: at most one frame and the last piece. A length above `max_bytes` is refused before anything
    of that size is allocated.
    """

    def __init__(self, *, with_crc: bool = False, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._with_crc = with_crc
        self._head = LENGTH_AND_CRC if with_crc else _LENGTH
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[bytes]:
        """Payloads completed by `data`, in order. Raises FrameError for a bad length or checksum.

        Iterate to the end before feeding again.
        """
        self._buffer += data
        position = 0
        try:
            while len(self._buffer) - position >= self._head.size:
                length, *crc = self._head.unpack_from(self._buffer, position)
                if length > self._max_bytes:
                    raise FrameError(
                        f"a frame of {length} bytes is longer than the {self._max_bytes} allowed"
                    )
                start = position + self._head.size
                if len(self._buffer) < start + length:
                    break
                payload = bytes(memoryview(self._buffer)[start : start + length])
                if crc and zlib.crc32(payload) != crc[0]:
                    raise FrameError(f"a frame of {length} bytes is damaged: its checksum does not fit")
                position = start + length
                yield payload
        finally:
            del self._buffer[:position]

    def finish(self) -> None:
        """Say that no more bytes come. Raises FrameError when they end inside a frame."""
        if self._buffer:
            raise FrameError(f"the stream ends inside a frame: {len(self._buffer)} bytes are left over")
