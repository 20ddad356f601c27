"""HTTP/1 as this server speaks it: hypercorn's protocol, stricter about heads, with errors of our form."""

from __future__ import annotations

from typing import Any, cast

import h11
import msgspec
import trio
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Response
from hypercorn.protocol.h11 import H11Protocol

from ksana.errors import RequestError
from ksana.gateway.errors import error_body
from ksana.gateway.limits import MAX_HEADER_BYTES

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


class Pause:
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


def fault_of(request: h11.Request) -> tuple[int, str] | None:
    """The status and text with which a request is refused for its head, which h11 found well-formed."""
    if not request.http_version.startswith(b"1."):
        return 505, "this server speaks HTTP/1.1"
    if len(request.target) > MAX_HEADER_BYTES:
        return 414, _TOO_LARGE[414]
    if (
        len(request.target) + sum(len(name) + len(value) + 4 for name, value in request.headers)
        > MAX_HEADER_BYTES
    ):
        return 431, _TOO_LARGE[431]
    names = {name for name, _ in request.headers}
    # h11 would go by Transfer-Encoding. Whoever stands before us may not, and see other requests than we do.
    if b"transfer-encoding" in names and b"content-length" in names:
        return 400, "a request has Content-Length or Transfer-Encoding, not both"
    if b"transfer-encoding" in names and request.http_version == b"1.0":
        return 400, "HTTP/1.0 has no Transfer-Encoding"
    return None


_TOO_LARGE = {
    414: f"the URI is longer than {MAX_HEADER_BYTES} bytes",
    431: f"the headers are larger than {MAX_HEADER_BYTES} bytes",
}


class StrictConnection(h11.Connection):
    """h11 that also refuses what `fault_of` finds. `refused` is the request, `fault` the text."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
        self.refused: h11.Request | None = None
        self.fault = ""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request) and (fault := fault_of(event)) is not None:
            self.refused = event
            status, self.fault = fault
            raise h11.RemoteProtocolError(self.fault, error_status_hint=status)
        return event


class Http1(H11Protocol):
    """hypercorn's HTTP/1 without upgrades (HTTP/2, web sockets), and with error bodies of our form."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.connection: StrictConnection = StrictConnection()

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
        if status_code == 431 and not self.connection.refused and self._is_request_line_too_long():
            status_code = 414
        text = self.connection.fault or _TOO_LARGE.get(status_code, "this is not a valid HTTP request")
        body = msgspec.json.encode(error_body(RequestError(text, status=status_code)))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        if self.connection.refused is None or self.connection.refused.method != b"HEAD":
            await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())

    def _is_request_line_too_long(self) -> bool:
        """Of a head that is too large before it is complete."""
        return b"\n" not in self.connection.trailing_data[0][:MAX_HEADER_BYTES]
