"""One HTTP request between the server and Quart: its tasks, what ends with it, its log line.

Whatever leaves the framework as an exception is answered here, in the form of all other errors.
"""

from __future__ import annotations

import logging
import traceback
from typing import Any, cast

import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, ASGISendEvent
from quart_trio.asgi import TrioASGIHTTPConnection

from ksana.errors import RequestError, ServiceError
from ksana.gateway.bodies import Request
from ksana.gateway.errors import error_bytes, internal_error
from ksana.gateway.http1 import acquire
from ksana.gateway.limits import PING_INTERVAL_S
from ksana.gateway.request_id import HEADER
from ksana.gateway.request_log import log_request
from ksana.gateway.request_scope import RequestScope, fault_of, open_scope
from ksana.gateway.sse import PING

log = logging.getLogger("ksana.gateway")


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
        own = open_scope(scope)
        answer = _Answer(send)
        try:
            await self._handle(own, answer, receive)
        except Exception as error:
            await _fail(own, answer, error)
        except BaseExceptionGroup as group:
            # Tasks that were cancelled and others that failed; the cancellation comes again by itself.
            failures, others = group.split(Exception)
            if failures is None or (others is not None and others.split(trio.Cancelled)[1] is not None):
                raise
            await _fail(own, answer, failures)
        finally:
            own.close()
            refusal = fault_of(scope) or own.refusal
            log_request(
                method=scope["method"],
                path=scope["path"],
                status=refusal.status if refusal is not None and answer.status is None else answer.status,
                is_complete=answer.complete or fault_of(scope) is not None,
                duration_s=trio.current_time() - started_s,
                request_id=own.request_id,
                refusal=refusal,
            )

    async def _handle(self, own: RequestScope, answer: _Answer, receive: ASGIReceiveCallable) -> None:
        async with trio.open_nursery() as nursery:
            own.nursery = answer.nursery = nursery
            quart_request = cast(Request, self._create_request_from_scope(answer.send))
            quart_request.body.budget = cast(Any, self.app).body_budget
            own.on_end(quart_request.body.close)
            nursery.start_soon(self.handle_messages, nursery, quart_request, receive)
            try:
                await self.handle_request(nursery, quart_request, answer.send)
            finally:
                own.close()


def _path_only(target: str) -> str:
    """The path of a request target that may also be a whole URL, `*`, or nothing."""
    if target.startswith("/"):
        return target
    return "/" + target.partition("://")[2].partition("/")[2]


async def _fail(own: RequestScope, answer: _Answer, error: Exception) -> None:
    """Answer for an exception that the framework did not. Once it understood the request, it is a bug."""
    cause: BaseException = error
    while isinstance(cause, BaseExceptionGroup) and len(cause.exceptions) == 1:
        cause = cause.exceptions[0]
    kind = type(cause).__name__
    failure: RequestError | ServiceError
    if own.is_routed:
        failure = internal_error(own.request_id)
        place = traceback.extract_tb(cause.__traceback__)[-1]
        where = f"{place.filename}:{place.lineno}"
        log.error("internal error, request id %s: %s at %s", own.request_id, kind, where)
    else:
        failure = RequestError(f"this request cannot be understood ({kind})", code="invalid_request")
    log.debug("request id %s", own.request_id, exc_info=cause)
    own.refusal = failure
    if answer.status is not None:
        return  # Returning now cuts the connection, so that nobody takes the answer for whole.
    body = error_bytes(failure)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (HEADER.lower().encode(), own.request_id.encode()),
    ]
    start = {"type": "http.response.start", "status": failure.status, "headers": headers}
    await answer.send(cast(ASGISendEvent, start))
    await answer.send(cast(ASGISendEvent, {"type": "http.response.body", "body": body, "more_body": False}))


class _Answer:
    """The sending side of one request."""

    nursery: trio.Nursery

    def __init__(self, send: ASGISendCallable) -> None:
        self._send = send
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
                self.nursery.start_soon(self._ping)

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
