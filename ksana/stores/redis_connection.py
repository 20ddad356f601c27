"""One connection to a Redis server: commands go out, replies come back in order."""

from __future__ import annotations

import trio

from ksana.errors import RemoteCacheError
from ksana.stores.envelope import Checksum, KeyFault
from ksana.stores.redis_address import RedisAddress
from ksana.stores.resp import ProtocolError, Reply, ReplyParser, ServerError, Status, command

_MAX_RECEIVED_AT_ONCE = 256 << 10
"""What is hashed in one go: 0.2 ms without the event loop."""


class ConnectionLost(RemoteCacheError):
    """The server closed the connection, or there is no way to it."""


class RedisConnection:
    """For one task at a time. After any exception, cancellation too, it is only good for `close`."""

    def __init__(self, stream: trio.SocketStream, address: RedisAddress) -> None:
        self._stream = stream
        self._address = address
        self._parser = ReplyParser()

    @classmethod
    async def open(cls, address: RedisAddress) -> RedisConnection:
        """Connect, log in, choose the database. RemoteCacheError if any of it fails."""
        try:
            if address.socket_path is not None:
                stream = await trio.open_unix_socket(address.socket_path)
            else:
                stream = await trio.open_tcp_stream(address.host, address.port)
        except (OSError, ValueError) as error:  # ValueError: a host's name that cannot be one
            reason = getattr(error, "strerror", None) or error
            raise ConnectionLost(f"Redis at {address}: {reason}") from error
        connection = cls(stream, address)
        try:
            await connection._introduce()
        except BaseException:
            connection.close()
            raise
        return connection

    async def _introduce(self) -> None:
        address = self._address
        if address.password is not None:
            words = [word.encode() for word in (address.user, address.password) if word is not None]
            await self.send(command(b"AUTH", *words))
            self.expect_ok(await self.receive(), "AUTH")
        if address.db:
            await self.send(command(b"SELECT", b"%d" % address.db))
            self.expect_ok(await self.receive(), "SELECT")

    def close(self) -> None:
        """At once, without waiting for anything; a task that waits for a reply gets ConnectionLost."""
        self._stream.socket.close()

    async def send(self, *pieces: bytes | memoryview) -> None:
        try:
            for piece in pieces:
                await self._stream.send_all(piece)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise self._lost(error) from error

    async def receive(self) -> Reply:
        """The next reply. ProtocolError if more came than was asked for."""
        replies = await self.receive_many(1)
        return replies[0]

    async def receive_many(self, number: int) -> list[Reply]:
        replies: list[Reply] = []
        while len(replies) < number:
            replies += self._parser.received(await self._receive_into(self._parser.space()))
        if len(replies) > number:
            raise ProtocolError(f"Redis at {self._address}: more replies than questions")
        return replies

    async def receive_bulk(self, header: memoryview, payload: memoryview, checksum: Checksum) -> Reply:
        """As `receive`, where the reply may be a bulk string that fills `header` and then `payload`.

        `checksum` is told the payload as it comes.
        """
        self._parser.expect_bulk(header, payload)
        hashed = 0
        while True:
            space = self._parser.space()[:_MAX_RECEIVED_AT_ONCE]
            replies = self._parser.received(await self._receive_into(space))
            num_here = self._parser.num_filled - len(header)
            if num_here > hashed:
                checksum.update(payload[hashed:num_here])
                hashed = num_here
            if len(replies) > 1:
                raise ProtocolError(f"Redis at {self._address}: more replies than questions")
            if replies:
                return replies[0]

    def expect_ok(self, reply: Reply, what: str) -> None:
        """RemoteCacheError unless the server said +OK."""
        if reply != Status("OK"):
            raise self.error(reply, what)

    def error(self, reply: Reply, what: str) -> RemoteCacheError:
        """What to raise for a reply that is not the right one."""
        if isinstance(reply, ServerError):
            # Servers quote commands they do not know, with the password.
            said = reply.code if what == "AUTH" else reply.text[:200]
            kind = KeyFault if reply.code == "WRONGTYPE" else RemoteCacheError
            return kind(f"Redis at {self._address} answers {what} with {said!r}")
        return ProtocolError(f"Redis at {self._address} answers {what} with something else than it should")

    async def _receive_into(self, space: memoryview) -> int:
        try:
            num_bytes = await self._stream.socket.recv_into(space)
        except (OSError, trio.ClosedResourceError) as error:
            raise self._lost(error) from error
        if not num_bytes:
            raise ConnectionLost(f"Redis at {self._address} closed the connection")
        return num_bytes

    def _lost(self, error: Exception) -> ConnectionLost:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        reason = getattr(cause, "strerror", None) or type(error).__name__
        return ConnectionLost(f"Redis at {self._address}: {reason}")
