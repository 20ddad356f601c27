"""One connection: bytes between a socket and hypercorn's HTTP/1 protocol, with a deadline on everything.

hypercorn's own trio shell has no deadline on a send, so a client that stops reading holds its request and
a shutdown for ever; it does not notice a client leaving while further bytes of it wait unread; it closes
in the middle of a body so that the client may miss the answer. This shell does none of that.

A client that says it sends nothing more (a half-close) looks just like one that has left, until something is
written to it: the second one's machine answers that with a reset. So it is written to (see `begun.Begun`).
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from typing import Any, cast

import h11
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.worker_context import TrioSingleTask, WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from ksana.gateway.http1 import MAX_RECEIVE, Http1, Pause, acquire
from ksana.gateway.limits import (
    HEAD_TIMEOUT_S,
    LINGER_BYTES,
    LINGER_S,
    PROBE_EVERY_S,
    SEND_PIECE_BYTES,
    SEND_TIMEOUT_S,
)

_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.001, 0.05
"""How long until the next look whether a reset has come."""


class Connection:
    """Owns the socket. `run` returns when the connection is closed, by whomever.

    `idle_since_s`: since when no request has been open here, if none is: the first or next head has not come
    whole, or the last answer is given and the connection being closed. Otherwise, `busy_since_s`.
    """

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
        self._idle_limit = trio.CancelScope()
        self.idle_since_s: float | None = trio.current_time()
        self.busy_since_s = 0.0
        self._watching: trio.CancelScope | None = None
        """Of the task that finds out whether a client that sends nothing more is still there."""
        self._closing = False
        self._is_over = False
        """Nothing is read any more."""
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
                cast(Any, self._protocol).can_read = Pause(
                    self._stream, self._protocol, self._watch_for_leaving, self._reading.cancel
                )
                await self._become_idle()
                await self._read()
                self._is_over = True
                if self._watching is not None:
                    self._watching.cancel()
                await self._idle.stop()
        finally:
            await trio.aclose_forcefully(self._stream)

    @property
    def awaits_body(self) -> bool:
        """Whether the rest of a request's body has not come."""
        return self.idle_since_s is None and self._protocol.connection.their_state is h11.SEND_BODY

    def close_idle(self) -> None:
        """Close a connection on which no request is open."""
        self._reading.cancel()

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
                    await self._protocol.handle(RawData(bytes(data)))
                    self._limit_head()
                if not data:
                    if self.idle_since_s is None:
                        self._watch_for_leaving()
                        # Until the answer is given or nobody is left to take it; both cancel this.
                        await trio.sleep_forever()
                    break
        await self._protocol.handle(Closed())

    def _watch_for_leaving(self) -> None:
        """The client sends nothing more, but may still read."""
        if self._watching is None:
            self._watching = trio.CancelScope()
            self._tasks.spawn(self._watch)

    async def _watch(self) -> None:
        assert self._watching is not None
        poll = select.poll()
        poll.register(self._stream.socket.fileno(), 0)  # only whether it is broken
        pause_s, probe_every_s, probe_s = _SHORTEST_LOOK_S, PROBE_EVERY_S, trio.current_time()
        with self._watching:
            while not poll.poll(0):
                if trio.current_time() >= probe_s:
                    await self._probe()
                    probe_s = trio.current_time() + probe_every_s
                    probe_every_s *= 2
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
            self._reading.cancel()

    async def _probe(self) -> None:
        await acquire(self._send_lock)
        try:
            if not self._closing:
                await self._send_bytes(self._protocol.begun.next(self._protocol.connection.our_state))
        finally:
            self._send_lock.release()

    async def _send(self, event: Event) -> None:
        """What hypercorn wants done to the socket."""
        if isinstance(event, RawData):
            await acquire(self._send_lock)
            try:
                await self._send_bytes(self._protocol.begun.rest_of(event.data))
            finally:
                self._send_lock.release()
        elif isinstance(event, Closed):
            await self._finish()
            await self._protocol.handle(Closed())
        elif isinstance(event, Updated):
            if event.idle:
                await self._become_idle()
            else:
                self.idle_since_s, self.busy_since_s = None, trio.current_time()
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
        self.idle_since_s = trio.current_time()
        try:
            await self._stream.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
            self._reading.cancel()
            return
        if self._protocol.connection.their_state in (h11.SEND_BODY, h11.ERROR):
            self._reading.deadline = trio.current_time() + LINGER_S
        else:
            self._reading.cancel()

    async def _become_idle(self) -> None:
        self.idle_since_s = trio.current_time()
        self._idle_limit = trio.CancelScope(deadline=self.idle_since_s + self._config.keep_alive_timeout)
        await self._idle.restart(self._tasks, self._close_when_idle)

    async def _close_when_idle(self) -> None:
        if self._is_over:  # an answer that was being finished when its client left
            return
        with self._idle_limit:
            await self._context.terminated.wait()
        self._reading.cancel()

    def _limit_head(self) -> None:
        """From the first byte of a head, the rest has to come sooner than a next request would."""
        if self.idle_since_s is not None and self._protocol.connection.trailing_data[0]:
            deadline_s = trio.current_time() + HEAD_TIMEOUT_S
            self._idle_limit.deadline = min(self._idle_limit.deadline, deadline_s)
