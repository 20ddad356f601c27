import itertools
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana.runtime.frames import FrameDecoder, FrameError, Header, encode_frame

payloads = st.lists(st.binary(max_size=200), max_size=8)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(payloads, st.lists(st.integers(0, 4000), max_size=12), st.booleans())
def test_pieces_of_any_size_give_the_payloads(sent: list[bytes], cuts: list[int], with_crc: bool) -> None:
    data = b"".join(encode_frame(payload, with_crc=with_crc) for payload in sent)
    decoder = FrameDecoder(with_crc=with_crc)
    got = [payload for piece in cut(data, cuts) for payload in decoder.feed(piece)]
    decoder.finish()
    assert got == sent


@given(payloads.filter(bool), st.integers(1, 10_000))
def test_a_cut_off_stream_is_noticed(sent: list[bytes], lost: int) -> None:
    data = b"".join(encode_frame(payload) for payload in sent)
    keep = len(data) - 1 - lost % len(data)
    boundaries = {0}
    for payload in sent:
        boundaries.add(max(boundaries) + 4 + len(payload))
    decoder = FrameDecoder()
    got = list(decoder.feed(data[:keep]))
    assert got == sent[: len(got)]
    if keep in boundaries:
        decoder.finish()
    else:
        with pytest.raises(FrameError, match="ends inside a frame"):
            decoder.finish()


@given(st.binary(min_size=1, max_size=300), st.integers(0, 2**20))
def test_a_flipped_bit_is_noticed_by_the_checksum(payload: bytes, where: int) -> None:
    frame = bytearray(encode_frame(payload, with_crc=True))
    bit = where % (8 * len(payload))
    frame[8 + bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(FrameError, match="damaged"):
        list(FrameDecoder(with_crc=True).feed(frame))


def test_a_huge_length_is_refused_before_its_bytes_come() -> None:
    decoder = FrameDecoder(max_bytes=1000)
    with pytest.raises(FrameError, match="1001 bytes is longer than the 1000"):
        list(decoder.feed(struct.pack("<I", 1001)))
    with pytest.raises(FrameError, match="longer"):
        encode_frame(b"x" * 1001, max_bytes=1000)


@given(st.binary(max_size=400), st.booleans())
def test_garbage_never_raises_anything_else(data: bytes, with_crc: bool) -> None:
    decoder = FrameDecoder(with_crc=with_crc, max_bytes=300)
    try:
        list(decoder.feed(data))
        decoder.finish()
    except FrameError:
        pass


def test_the_layout_is_as_written_down() -> None:
    assert encode_frame(b"abc") == b"\x03\x00\x00\x00abc"
    assert encode_frame(b"abc", with_crc=True) == b"\x03\x00\x00\x00" + struct.pack("<I", 0x352441C2) + b"abc"


def test_headers_that_do_not_fit_are_refused() -> None:
    header = Header(format="ksana.worker", settings={"a": 1})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(header), type=Header) == header
    header.check("ksana.worker")
    with pytest.raises(FrameError, match="both sides must be the same Ksana"):
        header.check("ksana.journal")
    with pytest.raises(FrameError, match="version 999"):
        msgspec.structs.replace(header, version=999).check("ksana.worker")
