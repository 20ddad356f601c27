from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana.errors import RemoteCacheError
from ksana.stores.resp import (
    Bulk,
    ProtocolError,
    Reply,
    ReplyParser,
    ServerError,
    Status,
    WrongSize,
    command,
    open_command,
)

TEXTS = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=80)


def feed(parser: ReplyParser, stream: bytes, sizes: list[int]) -> list[Reply]:
    """Give `stream` to the parser in chunks of these sizes, over and over, as a socket would."""
    replies: list[Reply] = []
    turn = 0
    while stream:
        space = parser.space()
        assert len(space) > 0
        num_bytes = min(sizes[turn % len(sizes)], len(space), len(stream))
        space[:num_bytes] = stream[:num_bytes]
        stream = stream[num_bytes:]
        replies += parser.received(num_bytes)
        turn += 1
    return replies


def encoded(reply: Reply, bulk: bytes) -> bytes:
    match reply:
        case Status(text):
            return f"+{text}\r\n".encode()
        case ServerError(_, text):
            return f"-{text}\r\n".encode()
        case Bulk(num_bytes):
            return b"$%d\r\n%b\r\n" % (num_bytes, bulk)
        case None:
            return b"$-1\r\n"
        case int(number):
            return b":%d\r\n" % number


SHORT_REPLIES = st.one_of(
    st.builds(Status, TEXTS),
    st.builds(lambda text: ServerError("ERR", f"ERR {text}"), TEXTS),
    st.integers(-(10**17), 10**17),
    st.none(),
)
SIZES = st.lists(st.integers(1, 50_000), min_size=1, max_size=5)
SMALL_SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=5)


@given(st.lists(SHORT_REPLIES, max_size=30), SIZES | SMALL_SIZES)
def test_short_replies_come_out_as_they_went_in(expected: list[Reply], sizes: list[int]) -> None:
    stream = b"".join(encoded(reply, b"") for reply in expected)
    assert feed(ReplyParser(), stream, sizes) == expected


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 60_000), st.lists(SHORT_REPLIES, max_size=3)), max_size=4
    ),
    SIZES,
    st.randoms(use_true_random=False),
)
def test_bulk_strings_land_where_they_belong(
    exchanges: list[tuple[int, int, list[Reply]]], sizes: list[int], chance: object
) -> None:
    parser = ReplyParser()
    for first, second, around in exchanges:
        bulk = chance.randbytes(first + second)  # type: ignore[attr-defined]
        assert feed(parser, b"".join(encoded(reply, b"") for reply in around), sizes) == around
        pieces = bytearray(first), bytearray(second)
        parser.expect_bulk(*map(memoryview, pieces))
        assert feed(parser, encoded(Bulk(len(bulk)), bulk), sizes) == [Bulk(len(bulk))]
        assert pieces[0] + pieces[1] == bulk
        assert parser.num_filled == len(bulk)


@pytest.mark.parametrize("sizes", [[1], [2, 3], [100]])
def test_bulk_strings_byte_by_byte_and_what_is_filled(sizes: list[int]) -> None:
    parser, into = ReplyParser(), bytearray(5)
    parser.expect_bulk(memoryview(into))
    assert parser.num_filled == 0
    assert feed(parser, b"$5\r\nhe", sizes) == []
    assert parser.num_filled == 2
    assert feed(parser, b"llo\r\n:1\r\n", sizes) == [Bulk(5), 1]
    assert into == b"hello"


def test_there_is_no_such_key_and_then_a_bulk_that_nobody_wants() -> None:
    parser, into = ReplyParser(), bytearray(2)
    parser.expect_bulk(memoryview(into))
    assert feed(parser, b"$-1\r\n", [100]) == [None]
    assert parser.num_filled == 0
    with pytest.raises(ProtocolError):
        feed(parser, b"$2\r\nab\r\n", [100])


@pytest.mark.parametrize(
    "stream",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"*1\r\n$1\r\na\r\n",
        b"%1\r\n",
        b"_\r\n",
        b"\r\n",
        b":\r\n",
        b":+1\r\n",
        b": 1\r\n",
        b":1_0\r\n",
        b":99999999999999999999999\r\n",
        b"$-2\r\n",
        b"$99999999999999999999999\r\n",
        b"$3\r\nabcde",
        b"$3\r\nabc\n\n",
        b"+" + b"x" * 5000,
        b"x" * 20_000,
    ],
)
@pytest.mark.parametrize("sizes", [[1], [100_000]])
def test_what_is_no_reply_is_an_error(stream: bytes, sizes: list[int]) -> None:
    parser = ReplyParser()
    parser.expect_bulk(memoryview(bytearray(3)))
    with pytest.raises(RemoteCacheError):
        feed(parser, stream, sizes)


@pytest.mark.parametrize("size", [0, 2, 4, 10**17])
def test_a_bulk_of_another_size_is_refused_before_it_is_read(size: int) -> None:
    parser, into = ReplyParser(), bytearray(3)
    parser.expect_bulk(memoryview(into))
    with pytest.raises(WrongSize):
        feed(parser, b"$%d\r\nabc" % size, [100])
    assert into == bytes(3)


FRAGMENTS = st.sampled_from(
    [b"\r\n", b"$", b"3", b"-1", b":", b"+", b"-", b"*", b"abc", b"\0", b"\xff" * 200]
)


@given(st.lists(FRAGMENTS | st.binary(max_size=20), max_size=60), SMALL_SIZES | SIZES)
def test_any_stream_gives_replies_or_an_error(fragments: list[bytes], sizes: list[int]) -> None:
    parser, into = ReplyParser(), bytearray(3)
    parser.expect_bulk(memoryview(into))
    try:
        replies = feed(parser, b"".join(fragments), sizes)
    except RemoteCacheError:
        return
    assert sum(isinstance(reply, Bulk) for reply in replies) <= 1


@given(st.lists(FRAGMENTS | st.binary(max_size=20), max_size=60), SIZES)
def test_an_outcome_does_not_depend_on_the_chunks(fragments: list[bytes], sizes: list[int]) -> None:
    def outcome(sizes: list[int]) -> tuple[list[Reply], type[Exception] | None, bytes]:
        parser, into = ReplyParser(), bytearray(3)
        parser.expect_bulk(memoryview(into))
        replies: list[Reply] = []
        stream = b"".join(fragments)
        turn = 0
        while stream:
            space = parser.space()
            num_bytes = min(sizes[turn % len(sizes)], len(space), len(stream))
            space[:num_bytes] = stream[:num_bytes]
            stream = stream[num_bytes:]
            turn += 1
            try:
                replies += parser.received(num_bytes)
            except RemoteCacheError as error:
                return [], type(error), bytes(into)
        return replies, None, bytes(into)

    assert outcome(sizes)[1:] == outcome([1])[1:]
    assert outcome(sizes)[0] == outcome([1])[0]


def test_commands_as_they_are_sent() -> None:
    assert command(b"GET", b"k\r\n") == b"*2\r\n$3\r\nGET\r\n$3\r\nk\r\n\r\n"
    assert open_command(b"SET", b"k", last_bytes=2) + b"hi\r\n" == command(b"SET", b"k", b"hi")
