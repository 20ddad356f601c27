"""Redis or Valkey as remote cache.

A block is the string `ksana:<key in hex>`, sealed as `ksana.stores.envelope` says. What is kept, and for how
long, is the server's business: give it `maxmemory` and `maxmemory-policy allkeys-lru`. Without them it grows
until it refuses to store more, which is an error like any other. WRONGTYPE is the fault of one key; other
errors of a server (OOM, READONLY, NOAUTH, NOPERM, ...) are its own, as other keys would fare no better.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio

from ksana.errors import RemoteCacheError
from ksana.stores import envelope
from ksana.stores.envelope import Checksum, DamagedValue
from ksana.stores.redis_address import RedisAddress
from ksana.stores.redis_connection import ConnectionLost, RedisConnection
from ksana.stores.resp import Bulk, Reply, ServerError, Status, command, open_command

T = TypeVar("T")

_MAX_CONNECTIONS = 4
_MAX_PIPELINED = 512
"""EXISTS commands on their way at once: 60 KB, so that neither side waits for the other to read."""
_HASHED_AT_ONCE = 256 << 10
"""Bytes; 0.2 ms without the event loop."""


class RedisStore:
    """Up to four connections, opened when needed and kept; a call that is cancelled costs its connection."""

    def __init__(self, address: RedisAddress) -> None:
        self._address = address
        self._slots = trio.Semaphore(_MAX_CONNECTIONS)
        self._idle: list[RedisConnection] = []
        self._busy: set[RedisConnection] = set()
        self._is_closed = False

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        names = [_name(key) for key in keys]

        async def ask(connection: RedisConnection) -> list[bool]:
            found: list[bool] = []
            for first in range(0, len(names), _MAX_PIPELINED):
                some = names[first : first + _MAX_PIPELINED]
                await connection.send(b"".join(command(b"EXISTS", name) for name in some))
                for reply in await connection.receive_many(len(some)):
                    if isinstance(reply, ServerError) and reply.code == "WRONGTYPE":
                        reply = 0  # of this key alone
                    if not isinstance(reply, int):
                        raise connection.error(reply, "EXISTS")
                    found.append(reply > 0)
            return found

        return await self._with_connection(ask)

    async def get(self, key: bytes, into: memoryview) -> bool:
        envelope.check_limits(key, len(into))
        name = _name(key)
        header = memoryview(bytearray(envelope.header_bytes(key)))

        async def read(connection: RedisConnection) -> bytes | None:
            checksum = Checksum(key, len(into))
            await connection.send(command(b"GET", name))
            reply = await connection.receive_bulk(header, into, checksum)
            if reply is None:
                return None
            if not isinstance(reply, Bulk):
                if isinstance(reply, ServerError) and reply.code == "WRONGTYPE":
                    raise DamagedValue(f"what lies under its key is no string ({reply.code})")
                raise connection.error(reply, "GET")
            return checksum.digest()

        try:
            found = await self._with_connection(read)
            if found is None:
                return False
            envelope.verify_checksum(found, envelope.verify_header(key, len(into), header))
        except DamagedValue:
            await self._delete(name)
            raise
        return True

    async def put(self, key: bytes, data: memoryview) -> None:
        envelope.check_limits(key, len(data))
        checksum = Checksum(key, len(data))
        for first in range(0, len(data), _HASHED_AT_ONCE):
            checksum.update(data[first : first + _HASHED_AT_ONCE])
            await trio.lowlevel.checkpoint()
        header = envelope.make_header(key, len(data), checksum.digest())
        opening = open_command(b"SET", _name(key), last_bytes=len(header) + len(data)) + header

        async def write(connection: RedisConnection) -> Reply:
            await connection.send(opening, data, b"\r\n")
            reply = await connection.receive()
            if reply != Status("OK"):
                raise connection.error(reply, "SET")
            return reply

        await self._with_connection(write)

    async def aclose(self) -> None:
        """Close all connections; calls under way end with RemoteCacheError."""
        self._is_closed = True
        for connection in [*self._idle, *self._busy]:
            connection.close()
        self._idle.clear()
        await trio.lowlevel.checkpoint()

    async def _delete(self, name: bytes) -> None:
        """A value nobody can use, so that it is not reported as present any more."""

        async def delete(connection: RedisConnection) -> Reply:
            await connection.send(command(b"DEL", name))
            return await connection.receive()

        with contextlib.suppress(RemoteCacheError):
            await self._with_connection(delete)

    async def _with_connection(self, action: Callable[[RedisConnection], Awaitable[T]]) -> T:
        async with self._slots:
            if self._idle:
                try:
                    return await self._run(self._idle.pop(), action)
                except ConnectionLost:
                    # The server was restarted since, so the others are dead too. Any action may be repeated.
                    self._close_idle()
            return await self._run(await RedisConnection.open(self._address), action)

    async def _run(self, connection: RedisConnection, action: Callable[[RedisConnection], Awaitable[T]]) -> T:
        if self._is_closed:
            connection.close()
            raise RemoteCacheError("this Redis store is closed")
        self._busy.add(connection)
        try:
            result = await action(connection)
        except BaseException:
            connection.close()
            raise
        finally:
            self._busy.discard(connection)
        self._keep(connection)
        return result

    def _keep(self, connection: RedisConnection) -> None:
        if self._is_closed:
            connection.close()
        else:
            self._idle.append(connection)

    def _close_idle(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def _name(key: bytes) -> bytes:
    envelope.check_limits(key, 0)
    return b"ksana:" + key.hex().encode()
