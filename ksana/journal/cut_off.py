"""A frame that has more bytes than the file has left: was it cut off, or is its length wrong?"""

from __future__ import annotations

import zlib
from typing import BinaryIO

from ksana.runtime.frames import LENGTH_AND_CRC

_SEARCH_BYTES = 16 << 20
"""How far behind a bad length a whole frame is looked for."""
_SHORT_FRAME_BYTES = 1024
_SEARCH_FRAME_BYTES = 1 << 20
_SEARCH_CHECKED_BYTES = 256 << 20
"""How much is checksummed in the search at most."""
_FIRST_BYTES = frozenset(range(0x92, 0x98))
"""How the payload of a frame begins: msgpack of a short array."""


def was_cut_off(file: BinaryIO, offset: int, size: int) -> bool:
    """Whether nothing whole is found at or behind `offset`, where a frame begins whose length does not fit.

    The file had `size` bytes when it was opened; what was written since does not count.
    """
    return not (
        _is_whole_but_for_its_length(file, offset, size)
        or _ends_with_a_frame(file, offset, size)
        or _is_followed_by_a_frame(file, offset + 1, size)
    )


def _is_whole_but_for_its_length(file: BinaryIO, offset: int, size: int) -> bool:
    """Whether the frame at `offset` ends where the file does: then it was not cut off."""
    file.seek(offset)
    data = file.read(min(_SEARCH_BYTES, size - offset))
    if len(data) <= LENGTH_AND_CRC.size:
        return False
    _, crc = LENGTH_AND_CRC.unpack_from(data)
    return bool(zlib.crc32(data[LENGTH_AND_CRC.size :]) == crc)


def _ends_with_a_frame(file: BinaryIO, start: int, size: int) -> bool:
    """Whether the last bytes from `start` to `size` are a short frame, such as a segment's end: then nothing
    was cut off, however long the frame is whose length is wrong."""
    start = max(start, size - _SHORT_FRAME_BYTES)
    file.seek(start)
    data = file.read(size - start)
    head = LENGTH_AND_CRC.size
    for at in range(len(data) - head):
        length, crc = LENGTH_AND_CRC.unpack_from(data, at)
        if length == len(data) - at - head and zlib.crc32(data[at + head :]) == crc:
            return True
    return False


def _is_followed_by_a_frame(file: BinaryIO, start: int, size: int) -> bool:
    """Whether a whole frame begins anywhere from `start` on: then what is before it was not cut off."""
    file.seek(start)
    data = file.read(min(_SEARCH_BYTES, size - start))
    head = LENGTH_AND_CRC.size
    num_left = _SEARCH_CHECKED_BYTES
    for at in range(len(data) - head):
        if data[at + head] not in _FIRST_BYTES:
            continue
        length, crc = LENGTH_AND_CRC.unpack_from(data, at)
        end = at + head + length
        if not 0 < length <= _SEARCH_FRAME_BYTES or end > len(data):
            continue
        if zlib.crc32(data[at + head : end]) == crc:
            return True
        num_left -= length
        if num_left < 0:
            break
    return False
