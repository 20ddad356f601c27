"""The part of Redis' wire protocol (RESP2) that a cache of blocks needs, without any I/O.

`ReplyParser` tells where the next bytes from the server belong (`space`) and is told how many came
(`received`); the payload of a bulk string goes straight to where the caller wants it. Nothing that the
server says makes it allocate.
"""

from __future__ import annotations

import re
from typing import NamedTuple, TypeAlias

from ksana.errors import RemoteCacheError
from ksana.stores.envelope import DamagedValue


class ProtocolError(RemoteCacheError):
    """The server does not speak RESP2, or not as asked. The connection is of no use any more."""


class WrongSize(DamagedValue):
    """A bulk string of another size than expected. The connection stands before its payload."""


class Status(NamedTuple):
    """`+OK`."""

    text: str


class ServerError(NamedTuple):
    """`-ERR ...`. The text may repeat what was sent, passwords too; the code does not."""

    code: str
    text: str


class Bulk(NamedTuple):
    """A bulk string has been put where it belongs."""

    num_bytes: int


Reply: TypeAlias = Status | ServerError | int | Bulk | None
"""None: the null bulk string, there is no such key."""

_BUFFER_BYTES = 16384
_MAX_LINE_BYTES = 4096
_NUMBER = re.compile(rb"-?[0-9]{1,18}")


def command(*words: bytes) -> bytes:
    """One command as it is sent."""
    return b"".join([b"*%d\r\n" % len(words), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)])


def open_command(*words: bytes, last_bytes: int) -> bytes:
    """A command whose last word, of `last_bytes` bytes, and then CRLF are sent after this."""
    head = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
    return b"*%d\r\n" % (len(words) + 1) + head + b"$%d\r\n" % last_bytes


class ReplyParser:
    """Replies of one connection, in order."""

    def __init__(self) -> None:
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._begin = 0
        self._end = 0
        self._pieces: list[memoryview] | None = None
        self._bulk: Bulk | None = None
        self._expected = 0
        self._missing = 0
        self._has_begun = False

    def expect_bulk(self, *pieces: memoryview) -> None:
        """The next bulk string belongs into these, and must fill them. Any other is a ProtocolError."""
        self._pieces = [piece for piece in pieces if len(piece)]
        self._expected = sum(len(piece) for piece in pieces)
        self._has_begun = False

    @property
    def num_filled(self) -> int:
        """How much of the bulk string last expected is in its place."""
        return self._expected - self._missing if self._has_begun else 0

    def space(self) -> memoryview:
        """Where the next bytes from the server go; never empty."""
        if self._missing:
            assert self._pieces
            return self._pieces[0]
        if self._begin:
            # A line's rest, hardly ever more than a few bytes.
            rest = bytes(self._view[self._begin : self._end])
            self._view[: len(rest)] = rest
            self._begin, self._end = 0, len(rest)
        return self._view[self._end :]

    def received(self, num_bytes: int) -> list[Reply]:
        """`num_bytes` bytes were put into `space()`; the replies they complete.

        ProtocolError or WrongSize end this parser's use.
        """
        if self._missing:
            self._fill(num_bytes)
        else:
            self._end += num_bytes
        replies: list[Reply] = []
        while self._advance(replies):
            pass
        return replies

    def _advance(self, replies: list[Reply]) -> bool:
        """One step through the buffer; whether there may be another."""
        if self._bulk is None:
            line = self._line()
            if line is None:
                return False
            self._parse(line, replies)
            return True
        if self._missing:
            assert self._pieces
            num_bytes = min(len(self._pieces[0]), self._end - self._begin)
            self._pieces[0][:num_bytes] = self._view[self._begin : self._begin + num_bytes]
            self._begin += num_bytes
            self._fill(num_bytes)
            return num_bytes > 0
        if self._end - self._begin < 2:
            return False
        if not self._buffer.startswith(b"\r\n", self._begin):
            raise ProtocolError("a bulk string without its end")
        self._begin += 2
        replies.append(self._bulk)
        self._bulk = self._pieces = None
        return True

    def _fill(self, num_bytes: int) -> None:
        assert self._pieces
        self._missing -= num_bytes
        if num_bytes == len(self._pieces[0]):
            self._pieces.pop(0)
        else:
            self._pieces[0] = self._pieces[0][num_bytes:]

    def _line(self) -> bytes | None:
        """The next line, if it is here whole."""
        limit = min(self._end, self._begin + _MAX_LINE_BYTES)
        place = self._buffer.find(b"\r\n", self._begin, limit)
        if place < 0:
            if limit < self._end or self._end - self._begin >= _MAX_LINE_BYTES:
                raise ProtocolError(f"a line of more than {_MAX_LINE_BYTES} bytes")
            return None
        line = bytes(self._view[self._begin : place])
        self._begin = place + 2
        return line

    def _parse(self, line: bytes, replies: list[Reply]) -> None:
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            replies.append(Status(rest.decode(errors="replace")))
        elif kind == b"-":
            text = rest.decode(errors="replace")
            code = re.match(r"[A-Z]{1,32}\b", text)
            replies.append(ServerError(code[0] if code else "an error", text))
        elif kind == b":":
            replies.append(self._number(rest))
        elif kind == b"$" and rest == b"-1":
            self._pieces = None
            replies.append(None)
        elif kind == b"$":
            self._begin_bulk(self._number(rest))
        else:
            raise ProtocolError(f"{line[:40]!r} is no reply of a Redis server to what was asked")

    def _begin_bulk(self, num_bytes: int) -> None:
        if self._pieces is None:
            raise ProtocolError("a bulk string that was not asked for")
        if num_bytes != self._expected:
            raise WrongSize(f"a value of {num_bytes} bytes where {self._expected} were expected")
        self._bulk = Bulk(num_bytes)
        self._has_begun = True
        self._missing = num_bytes

    def _number(self, text: bytes) -> int:
        if not _NUMBER.fullmatch(text):
            raise ProtocolError(f"{text[:40]!r} is no number")
        return int(text)
