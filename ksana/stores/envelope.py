"""What a stored value looks like, and the one place that says whether to believe one.

    value   = header + payload
    header  = magic "KSKV", version u16, key length u16, payload length u64, checksum [32], key
    checksum = SHA-256 over magic, version, key length, payload length, key, payload

All numbers are little-endian. The checksum covers the key, so that a value found under another key is as
wrong as one with a flipped bit. It guards against accidents, not against those who may write to the store:
they can make any value valid. SHA-256 rather than CRC-32 because a wrong block would be wrong tokens
without a sign, and one in 2**32 damaged blocks is not never; with CPU support it makes about 2 GB/s.
"""

from __future__ import annotations

import hashlib
import struct

from ksana.errors import RemoteCacheError

MAGIC = b"KSKV"
VERSION = 1

MAX_KEY_BYTES = 64
"""Keys are a SHA-256 and a letter; doubled by hex they must still fit a file name."""

MAX_PAYLOAD_BYTES = 256 << 20
"""Far above any block of KV; what claims to be larger is not read at all."""

_FIXED = struct.Struct("<4sHHQ32s")
_CHECKED = struct.Struct("<4sHHQ")


class KeyFault(RemoteCacheError):
    """One key cannot be read or written because of what stands in its place; the store itself is well."""


class DamagedValue(RemoteCacheError):
    """The value is not what its key stands for and will never be: stores delete it, as they would report
    it as present for ever. (Size and format version too belong to what a key stands for.)"""


def check_limits(key: bytes, payload_bytes: int) -> None:
    """Refuse with RemoteCacheError what no store may be asked for."""
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise RemoteCacheError(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(key)}")
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise RemoteCacheError(f"{payload_bytes} bytes are more than a value may have ({MAX_PAYLOAD_BYTES})")


def header_bytes(key: bytes) -> int:
    """Size of the header of a value under `key`."""
    return _FIXED.size + len(key)


class Checksum:
    """The checksum of a payload that comes in pieces."""

    def __init__(self, key: bytes, payload_bytes: int) -> None:
        self._hash = hashlib.sha256(_CHECKED.pack(MAGIC, VERSION, len(key), payload_bytes))
        self._hash.update(key)

    def update(self, piece: bytes | bytearray | memoryview) -> None:
        self._hash.update(piece)

    def digest(self) -> bytes:
        """32 bytes."""
        return self._hash.digest()


def checksum(key: bytes, payload: bytes | bytearray | memoryview) -> bytes:
    """The 32 bytes that say `payload` belongs to `key`, whole."""
    whole = Checksum(key, len(payload))
    whole.update(payload)
    return whole.digest()


def make_header(key: bytes, payload_bytes: int, checksum: bytes) -> bytes:
    """The header of a payload with this checksum. Sizes above the limits are RemoteCacheError."""
    check_limits(key, payload_bytes)
    return _FIXED.pack(MAGIC, VERSION, len(key), payload_bytes, checksum) + key


def seal(key: bytes, payload: bytes | bytearray | memoryview) -> bytes:
    """The header to put before `payload` (not copied). Sizes above the limits are RemoteCacheError."""
    return make_header(key, len(payload), checksum(key, payload))


def verify_header(key: bytes, payload_bytes: int, header: bytes | bytearray | memoryview) -> bytes:
    """The checksum that the payload must have. `header` has `header_bytes(key)` bytes.

    DamagedValue unless it is the header of a value of exactly `payload_bytes` bytes under `key`, in this
    version of the format.
    """
    if len(header) != header_bytes(key):
        raise DamagedValue(f"a header of {len(header)} bytes, not {header_bytes(key)}")
    magic, version, key_bytes, size, expected = _FIXED.unpack_from(header)
    if magic != MAGIC:
        raise DamagedValue("no value of this cache: the first bytes are not its magic number")
    if version != VERSION:
        raise DamagedValue(f"a value of format version {version}; this one reads {VERSION}")
    if key_bytes != len(key) or bytes(header[_FIXED.size :]) != key:
        raise DamagedValue("the value of another key")
    if size != payload_bytes:
        raise DamagedValue(f"a value of {size} bytes where {payload_bytes} were expected")
    return bytes(expected)


def verify_checksum(found: bytes, expected: bytes) -> None:
    if found != expected:
        raise DamagedValue("the checksum does not match: the payload was changed on its way or in the store")


def verify(key: bytes, value: bytes | bytearray | memoryview, into: memoryview) -> None:
    """Copy the payload of a whole `value` to `into`, or raise DamagedValue and leave it alone."""
    size = header_bytes(key)
    if len(value) < size:
        raise DamagedValue(f"{len(value)} bytes are too few for a value's header of {size}")
    whole = memoryview(value)
    expected = verify_header(key, len(into), whole[:size])
    if len(value) != size + len(into):
        raise DamagedValue(f"a value of {len(value)} bytes; its header says {size + len(into)}")
    verify_checksum(checksum(key, whole[size:]), expected)
    into[:] = whole[size:]
