from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana.errors import RemoteCacheError
from ksana.stores import envelope
from ksana.stores.envelope import DamagedValue

KEYS = st.binary(min_size=1, max_size=envelope.MAX_KEY_BYTES)
PAYLOADS = st.binary(max_size=300)


def sealed(key: bytes, payload: bytes) -> bytes:
    return envelope.seal(key, payload) + payload


@given(KEYS, PAYLOADS)
def test_round_trip(key: bytes, payload: bytes) -> None:
    into = bytearray(len(payload))
    envelope.verify(key, sealed(key, payload), memoryview(into))
    assert into == payload


@given(KEYS, PAYLOADS, st.data())
def test_any_changed_byte_is_found_and_nothing_is_copied(
    key: bytes, payload: bytes, data: st.DataObject
) -> None:
    value = bytearray(sealed(key, payload))
    place = data.draw(st.integers(0, len(value) - 1))
    value[place] ^= data.draw(st.integers(1, 255))
    into = bytearray(b"\xee" * len(payload))
    with pytest.raises(RemoteCacheError):
        envelope.verify(key, value, memoryview(into))
    assert into == b"\xee" * len(payload)


@given(KEYS, PAYLOADS, KEYS)
def test_any_other_key_is_found(key: bytes, payload: bytes, other: bytes) -> None:
    if other != key:
        with pytest.raises(DamagedValue):
            envelope.verify(other, sealed(key, payload), memoryview(bytearray(len(payload))))


@given(KEYS, PAYLOADS, st.integers(0, 400))
def test_any_other_length_is_found(key: bytes, payload: bytes, length: int) -> None:
    value = sealed(key, payload)
    changed = value[:length] + bytes(max(0, length - len(value)))
    if length != len(value):
        with pytest.raises(DamagedValue):
            envelope.verify(key, changed, memoryview(bytearray(len(payload))))


@given(KEYS, st.binary(max_size=400), st.integers(0, 300))
def test_nonsense_is_never_accepted(key: bytes, nonsense: bytes, size: int) -> None:
    with pytest.raises(RemoteCacheError):
        envelope.verify(key, nonsense, memoryview(bytearray(size)))


@given(KEYS, PAYLOADS, st.lists(st.integers(0, 300)))
def test_the_checksum_does_not_depend_on_the_pieces(key: bytes, payload: bytes, cuts: list[int]) -> None:
    pieces = envelope.Checksum(key, len(payload))
    begin = 0
    for end in [*sorted(min(cut, len(payload)) for cut in cuts), len(payload)]:
        pieces.update(payload[begin:end])
        begin = end
    assert pieces.digest() == envelope.checksum(key, payload)


def test_the_format_is_what_it_was() -> None:
    """Values of other processes, perhaps older ones, must stay readable: change VERSION with the format."""
    assert envelope.VERSION == 1
    assert sealed(b"key", b"payload").hex() == (
        "4b534b56010003000700000000000000adcfb5ce2ca89529096cd752bee0cf4606a96fd5c20ddaed"
        "d67124c29b8ea1a76b65797061796c6f6164"
    )


def test_another_version_is_damage_so_that_it_is_deleted_and_stored_anew() -> None:
    value = bytearray(sealed(b"key", b"payload"))
    value[4] = 2
    with pytest.raises(DamagedValue, match="version 2"):
        envelope.verify(b"key", value, memoryview(bytearray(7)))
