"""One HTTP request between the server and Quart: its tasks, what ends with it, its log line."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, ASGISendEvent
from quart import g, request
from quart_trio.asgi import TrioASGIHTTPConnection

from ksana.gateway.bodies import Request
from ksana.gateway.http1 import acquire
from ksana.gateway.limits import PING_INTERVAL_S
from ksana.gateway.sse import PING

log = logging.getLogger("ksana.gateway")

_SCOPE_KEY = "ksana.request"
_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})


class RequestScope:
    """What belongs to one HTTP request from its first byte to the last byte of its answer."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        """Tasks started here end with the request, however it ends."""
        self.request_id = ""
        self._closers: list[Callable[[], None]] = []

    def on_end(self, close: Callable[[], None]) -> None:
        """Call `close` (which must not wait) when the request is over, however it ended."""
        self._closers.append(close)

    def close(self) -> None:
        while self._closers:
            self._closers.pop()()


def request_scope() -> RequestScope:
    """The scope of the current request."""
    return cast(RequestScope, cast(dict[str, Any], request.scope)[_SCOPE_KEY])


def set_request_id(request_id: str) -> None:
    """Name the current request, in its log line and in error texts."""
    g.request_id = request_id
    request_scope().request_id = request_id


class HttpConnection(TrioASGIHTTPConnection):
    """Quart's handling of one request, plus a `RequestScope`.

    The client's leaving cancels the nursery, and with it the handler and its tasks. The last send of an
    answer is shielded: it closes or recycles the connection, and its own news that the request is over
    would cancel it half-way, leaving connections open that should be closed.
    """

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        scope = cast(dict[str, Any], self.scope)
        scope["path"] = _path_only(scope["path"])
        started_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            own = scope[_SCOPE_KEY] = RequestScope(nursery)
            answer = _Answer(send, nursery)
            quart_request = cast(Request, self._create_request_from_scope(answer.send))
            quart_request.body.budget = cast(Any, self.app).body_budget
            own.on_end(quart_request.body.close)
            try:
                nursery.start_soon(self.handle_messages, nursery, quart_request, receive)
                await self.handle_request(nursery, quart_request, answer.send)
            finally:
                own.close()
                _log(scope, answer, own.request_id, trio.current_time() - started_s)


def _path_only(target: str) -> str:
    """The path of a request target that may also be a whole URL, `*`, or nothing."""
    if target.startswith("/"):
        return target
    return "/" + target.partition("://")[2].partition("/")[2]


class _Answer:
    """The sending side of one request."""

    def __init__(self, send: ASGISendCallable, nursery: trio.Nursery) -> None:
        self._send = send
        self._nursery = nursery
        self._lock = trio.Lock()
        self._last_sent_s = 0.0
        self.status: int | None = None
        self.complete = False

    async def send(self, message: ASGISendEvent) -> None:
        event = cast(dict[str, Any], message)
        await acquire(self._lock)
        try:
            if event["type"] == "http.response.body" and not event.get("more_body", False):
                self.complete = True
                with trio.CancelScope(shield=True):
                    await self._send(message)
                return
            await self._send(message)
            self._last_sent_s = trio.current_time()
        finally:
            self._lock.release()
        if event["type"] == "http.response.start":
            self.status = event["status"]
            if any(
                name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in event["headers"]
            ):
                self._nursery.start_soon(self._ping)

    async def _ping(self) -> None:
        while not self.complete:
            due_s = self._last_sent_s + PING_INTERVAL_S
            if due_s > trio.current_time():
                await trio.sleep_until(due_s)
                continue
            await self._send_ping()

    async def _send_ping(self) -> None:
        async with self._lock:
            if not self.complete:
                await self._send({"type": "http.response.body", "body": PING, "more_body": True})
                self._last_sent_s = trio.current_time()


def _log(scope: dict[str, Any], answer: _Answer, request_id: str, duration_s: float) -> None:
    status = answer.status if answer.status is not None else "-"
    log.log(
        logging.DEBUG if scope["path"] in _QUIET_PATHS else logging.INFO,
        "%s %.200s %s%s %.1f ms %s",
        scope["method"],
        ascii(scope["path"]),
        status,
        "" if answer.complete else " (client left)",
        duration_s * 1000,
        request_id,
    )
