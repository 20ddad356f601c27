"""One KV block as a safetensors file, so that people can look into a store with what they have.

    u64 header length | header, JSON padded with spaces to 8 bytes | payload

The header has one tensor, `kv` (U8, as long as the payload), and says in `__metadata__` which format it is,
of which key (hex) and with which checksum (hex; `ksana.stores.envelope`). Functions here block.
"""

from __future__ import annotations

import os
from io import FileIO

import msgspec

from ksana.stores import envelope
from ksana.stores.envelope import DamagedValue

FORMAT = f"ksana-block-{envelope.VERSION}"
MAX_HEADER_BYTES = 4096
_ALIGNMENT = 8


class _Metadata(msgspec.Struct, frozen=True):
    format: str
    key: str
    checksum: str


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int]
    data_offsets: tuple[int, int]


class _Header(msgspec.Struct, frozen=True):
    metadata: _Metadata = msgspec.field(name="__metadata__")
    kv: _Tensor = msgspec.field(name="kv")


_decoder = msgspec.json.Decoder(_Header)


def header(key: bytes, payload_bytes: int, checksum: bytes) -> bytes:
    """Everything that stands before the payload."""
    text = msgspec.json.encode(
        _Header(
            metadata=_Metadata(format=FORMAT, key=key.hex(), checksum=checksum.hex()),
            kv=_Tensor(dtype="U8", shape=(payload_bytes,), data_offsets=(0, payload_bytes)),
        )
    )
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def write(descriptor: int, key: bytes, payload: bytes) -> int:
    """Write the whole file and close it; how many bytes it has. OSError as it comes."""
    with os.fdopen(descriptor, "wb") as file:
        head = header(key, len(payload), envelope.checksum(key, payload))
        file.write(head)
        file.write(payload)
    return len(head) + len(payload)


def read(file: FileIO, info: os.stat_result, key: bytes, payload_bytes: int) -> bytearray:
    """The verified payload of a regular file just opened, unbuffered, of which the system says `info`.

    DamagedValue if it is not a whole and unharmed block of `payload_bytes` bytes under `key`, in this
    version of the format; OSError as it comes.
    """
    header_bytes = int.from_bytes(_exactly(file, 8), "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise DamagedValue(f"a header of {header_bytes} bytes is no block's")
    expected = _verify_header(bytes(_exactly(file, header_bytes)), key, payload_bytes)
    if info.st_size != 8 + header_bytes + payload_bytes:
        raise DamagedValue(f"{info.st_size} bytes, not {8 + header_bytes + payload_bytes}")
    payload = _exactly(file, payload_bytes)
    envelope.verify_checksum(envelope.checksum(key, payload), expected)
    return payload


def _verify_header(text: bytes, key: bytes, payload_bytes: int) -> bytes:
    """The checksum that the header names."""
    try:
        parsed = _decoder.decode(text)
        checksum = bytes.fromhex(parsed.metadata.checksum)
    except ValueError as error:  # msgspec.DecodeError is one
        raise DamagedValue(f"its header cannot be read ({error})") from None
    if parsed.metadata.format != FORMAT:
        raise DamagedValue(f"a block of format {parsed.metadata.format[:40]!r}; this one reads {FORMAT}")
    if parsed.metadata.key != key.hex():
        raise DamagedValue("the block of another key")
    if parsed.kv != _Tensor(dtype="U8", shape=(payload_bytes,), data_offsets=(0, payload_bytes)):
        raise DamagedValue(f"not a block of {payload_bytes} bytes")
    return checksum


def _exactly(file: FileIO, size: int) -> bytearray:
    """`size` bytes in a buffer of our own; DamagedValue if the file ends before."""
    buffer = bytearray(size)
    rest = memoryview(buffer)
    while rest:
        num_read = file.readinto(rest)
        if not num_read:
            raise DamagedValue(f"it ends {len(rest)} bytes too early")
        rest = rest[num_read:]
    return buffer
