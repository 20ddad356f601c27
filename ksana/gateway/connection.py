"""One connection: bytes between a socket and hypercorn's HTTP/1 protocol, with a deadline on everything.

hypercorn's own trio shell has no deadline on a send, so a client that stops reading holds its request and
a shutdown for ever; it does not notice a client leaving while further bytes of it wait unread; it closes
in the middle of a body so that the client may miss the answer. This shell does none of that.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Any, cast

import h11
import msgspec
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Response
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.worker_context import TrioSingleTask, WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from ksana.errors import RequestError
from ksana.gateway.errors import error_body
from ksana.gateway.limits import LINGER_BYTES, LINGER_S, SEND_PIECE_BYTES, SEND_TIMEOUT_S

MAX_RECEIVE = 64 << 10
MAX_AHEAD = 64 << 10
"""Bytes of further requests that are read while one is being answered."""


class ClientLeft(Exception):
    """The client closed the connection while its request was being answered."""


async def acquire(lock: trio.Lock) -> None:
    """Take a lock; without a turn of the scheduler (10 µs, once per event and stream) when it is free."""
    try:
        lock.acquire_nowait()
    except trio.WouldBlock:
        await lock.acquire()


class _Pause:
    """hypercorn's `can_read`: where reading waits for the answer to the request before.

    While waiting it reads ahead, into h11's buffer, so as to notice when the client leaves.
    """

    def __init__(self, stream: trio.SocketStream, protocol: H11Protocol) -> None:
        self._stream = stream
        self._protocol = protocol
        self._over = trio.Event()

    async def clear(self) -> None:
        self._over = trio.Event()

    async def set(self) -> None:
        self._over.set()

    def is_set(self) -> bool:
        return self._over.is_set()

    async def wait(self) -> None:
        left = False

        async def watch() -> None:
            nonlocal left
            num_ahead = 0
            while num_ahead < MAX_AHEAD:
                data = await self._stream.receive_some(MAX_RECEIVE)
                if not data:
                    left = True
                    nursery.cancel_scope.cancel()
                    return
                num_ahead += len(data)
                cast(h11.Connection, self._protocol.connection).receive_data(bytes(data))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await self._over.wait()
            nursery.cancel_scope.cancel()
        if left:
            raise ClientLeft


class Http1(H11Protocol):
    """hypercorn's HTTP/1 without upgrades (HTTP/2, web sockets), and with error bodies of our form."""

    async def stream_send(self, event: StreamEvent) -> None:
        if isinstance(event, Response) and self._ends_with_this_answer():
            # Unsaid, a client would send its next request into the closing.
            event.headers.append((b"connection", b"close"))
        await super().stream_send(event)

    def _ends_with_this_answer(self) -> bool:
        """Whether the connection cannot be used again: the body is still coming, or the server stops."""
        still_comes = self.connection.their_state is not h11.DONE
        return still_comes or bool(self.context.terminated.is_set())

    async def _check_protocol(self, event: h11.Request) -> None:
        pass

    async def _create_stream(self, request: h11.Request) -> None:
        await super()._create_stream(
            h11.Request(
                method=request.method,
                target=request.target,
                http_version=request.http_version,
                headers=[(name, value) for name, value in request.headers if name != b"upgrade"],
            )
        )

    async def _send_error_response(self, status_code: int) -> None:
        text = "the headers are too large" if status_code == 431 else "this is not a valid HTTP request"
        body = msgspec.json.encode(error_body(RequestError(text, status=status_code)))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


class Connection:
    """Owns the socket. `run` returns when the connection is closed, by whomever."""

    def __init__(
        self, app: ASGIWrapper, config: Config, context: WorkerContext, stream: trio.SocketStream
    ) -> None:
        self._app = app
        self._config = config
        self._context = context
        self._stream = stream
        self._send_lock = trio.Lock()
        self._sending = trio.CancelScope()
        self._reading = trio.CancelScope()
        self._idle = TrioSingleTask()
        self._closing = False
        self._aborted = False

    async def run(self) -> None:
        sock = self._stream.socket
        try:
            peer, here = sock.getpeername(), sock.getsockname()
        except OSError:  # gone already
            await self._stream.aclose()
            return
        try:
            async with TaskGroup() as tasks:
                self._tasks = tasks
                self._protocol = Http1(
                    self._app,
                    self._config,
                    self._context,
                    tasks,
                    ConnectionState({}),
                    False,
                    parse_socket_addr(sock.family, peer),
                    parse_socket_addr(sock.family, here),
                    self._send,
                )
                cast(Any, self._protocol).can_read = _Pause(self._stream, self._protocol)
                await self._idle.restart(tasks, self._close_when_idle)
                await self._read()
                await self._idle.stop()
        finally:
            await trio.aclose_forcefully(self._stream)

    def abort(self) -> None:
        """Close at once, whatever is still to be sent."""
        self._aborted = True
        linger = struct.pack("ii", 1, 0)
        with contextlib.suppress(OSError):
            self._stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._sending.cancel()
        self._reading.cancel()

    async def _read(self) -> None:
        num_discarded = 0
        with self._reading:
            while num_discarded < LINGER_BYTES:
                try:
                    data = await self._stream.receive_some(MAX_RECEIVE)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    break
                if self._closing:
                    num_discarded += len(data)
                else:
                    try:
                        await self._protocol.handle(RawData(bytes(data)))
                    except ClientLeft:
                        break
                if not data:
                    break
        await self._protocol.handle(Closed())

    async def _send(self, event: Event) -> None:
        """What hypercorn wants done to the socket."""
        if isinstance(event, RawData):
            await acquire(self._send_lock)
            try:
                await self._send_bytes(event.data)
            finally:
                self._send_lock.release()
        elif isinstance(event, Closed):
            await self._finish()
            await self._protocol.handle(Closed())
        elif isinstance(event, Updated):
            if event.idle:
                await self._idle.restart(self._tasks, self._close_when_idle)
            else:
                await self._idle.stop()

    async def _send_bytes(self, data: bytes) -> None:
        if self._aborted:
            return
        # Half a chunk on the wire would be worse than a slow cancellation, hence the shield; the deadline
        # keeps it from being for ever.
        try:
            with trio.CancelScope(shield=True) as self._sending:
                for start in range(0, len(data), SEND_PIECE_BYTES):
                    self._sending.deadline = trio.current_time() + SEND_TIMEOUT_S
                    await self._stream.send_all(data[start : start + SEND_PIECE_BYTES])
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await self._protocol.handle(Closed())
            return
        if self._sending.cancelled_caught:
            self.abort()
            await self._protocol.handle(Closed())

    async def _finish(self) -> None:
        """Say that nothing more comes. If the client is still sending, take it for a while: closing on unread
        bytes would reset the connection, and the client might never see the answer."""
        self._closing = True
        try:
            await self._stream.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
            self._reading.cancel()
            return
        if self._protocol.connection.their_state in (h11.SEND_BODY, h11.ERROR):
            self._reading.deadline = trio.current_time() + LINGER_S
        else:
            self._reading.cancel()

    async def _close_when_idle(self) -> None:
        with trio.move_on_after(self._config.keep_alive_timeout):
            await self._context.terminated.wait()
        self._reading.cancel()
