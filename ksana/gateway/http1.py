"""HTTP/1 as this server speaks it: hypercorn's protocol, stricter about heads, with errors of our form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import h11
import trio
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Response
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.typing import H11SendableEvent

from ksana.errors import RequestError
from ksana.gateway.begun import Begun
from ksana.gateway.errors import error_bytes
from ksana.gateway.limits import MAX_HEADER_BYTES
from ksana.gateway.request_id import HEADER
from ksana.gateway.request_log import log_request
from ksana.gateway.request_scope import request_id_of, set_fault
from ksana.gateway.strict_connection import TOO_LARGE, StrictConnection

MAX_RECEIVE = 64 << 10
MAX_AHEAD = 64 << 10
"""Bytes of further requests that are read while one is being answered."""


async def acquire(lock: trio.Lock) -> None:
    """Take a lock; without a turn of the scheduler (10 µs, once per event and stream) when it is free."""
    try:
        lock.acquire_nowait()
    except trio.WouldBlock:
        await lock.acquire()


class Pause:
    """hypercorn's `can_read`: where reading waits for the answer to the request before.

    While waiting it reads ahead, into h11's buffer, so as to notice when the client ends or leaves.
    """

    def __init__(
        self,
        stream: trio.SocketStream,
        protocol: H11Protocol,
        on_end: Callable[[], None],
        on_leave: Callable[[], None],
    ) -> None:
        """`on_end` is told that the client sends nothing more, `on_leave` that it is gone."""
        self._stream = stream
        self._protocol = protocol
        self._on_end = on_end
        self._on_leave = on_leave
        self._over = trio.Event()

    async def clear(self) -> None:
        self._over = trio.Event()

    async def set(self) -> None:
        self._over.set()

    def is_set(self) -> bool:
        return self._over.is_set()

    async def wait(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read_ahead)
            await self._over.wait()
            nursery.cancel_scope.cancel()

    async def _read_ahead(self) -> None:
        num_ahead = 0
        while num_ahead < MAX_AHEAD:
            try:
                data = await self._stream.receive_some(MAX_RECEIVE)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self._on_leave()
                return
            cast(h11.Connection, self._protocol.connection).receive_data(bytes(data))
            if not data:
                self._on_end()
                return
            num_ahead += len(data)


class Http1(H11Protocol):
    """hypercorn's HTTP/1 without upgrades (HTTP/2, web sockets), and with error bodies of our form."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.connection: StrictConnection = StrictConnection()
        self.begun = Begun()
        self._is_refused = False

    async def stream_send(self, event: StreamEvent) -> None:
        if isinstance(event, Response):
            if self._ends_with_this_answer():
                # Unsaid, a client would send its next request into the closing.
                event.headers.append((b"connection", b"close"))
            self.begun.in_chunks = self._comes_in_chunks(event)
        await super().stream_send(event)

    def _comes_in_chunks(self, response: Response) -> bool:
        """Whether h11 will choose the chunked encoding; only streams are asked about."""
        is_http_1_0 = self.connection.their_http_version == b"1.0"
        has_length = any(name.lower() == b"content-length" for name, _ in response.headers)
        return response.status_code == 200 and not (is_http_1_0 or has_length)

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

    async def _send_h11_event(self, event: H11SendableEvent) -> None:
        try:
            await super()._send_h11_event(event)
        except h11.LocalProtocolError:
            if not self._is_refused:  # else the application answers what has been answered here
                raise

    async def _send_error_response(self, status_code: int) -> None:
        if status_code == 431 and not self.connection.refused and self._is_request_line_too_long():
            status_code = 414
        text = self.connection.fault or TOO_LARGE.get(status_code, "this is not a valid HTTP request")
        error = RequestError(text, status=status_code, code="invalid_http")
        request_id = self._tell(error)
        body = error_bytes(error)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            (HEADER.lower().encode(), request_id.encode()),
        ]
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        if self.connection.refused is None or self.connection.refused.method != b"HEAD":
            await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())
        self._is_refused = True

    def _tell(self, error: RequestError) -> str:
        """See that the log has one line about a refused request. Returns what the request is called."""
        if isinstance(self.stream, HTTPStream) and not self.stream.closed:
            scope = cast(dict[str, Any], self.stream.scope)
            set_fault(scope, error)  # the application's line tells it
            return request_id_of(scope)
        refused = self.connection.refused
        request_id = request_id_of({"headers": list(refused.headers) if refused else []})
        method, path = self.connection.request_line
        log_request(
            method=method,
            path=path,
            status=error.status,
            is_complete=True,
            duration_s=0.0,
            request_id=request_id,
            refusal=error,
        )
        return request_id

    def _is_request_line_too_long(self) -> bool:
        """Of a head that is too large before it is complete."""
        return b"\n" not in self.connection.trailing_data[0][:MAX_HEADER_BYTES]
