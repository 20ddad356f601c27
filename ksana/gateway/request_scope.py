"""What belongs to one HTTP request from its first byte to the last byte of its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import trio
from quart import request

from ksana.errors import RequestError, ServiceError
from ksana.gateway.request_id import HEADER, choose_request_id

_SCOPE_KEY = "ksana.request"
_ID_KEY = "ksana.request_id"
_FAULT_KEY = "ksana.fault"
_ID_HEADER = HEADER.lower().encode()

Scope = dict[str, Any]
"""ASGI's, which the protocol below and the framework above both hold."""


class RequestScope:
    """One request. `nursery` is given as soon as there is one."""

    nursery: trio.Nursery
    """Tasks started here end with the request, however it ends."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.is_routed = False
        """Whether the framework has understood the request: what fails from then on is our fault."""
        self.refusal: RequestError | ServiceError | None = None
        """Why it has no good answer, for the log."""
        self._closers: list[Callable[[], None]] = []

    def on_end(self, close: Callable[[], None]) -> None:
        """Call `close` (which must not wait) when the request is over, however it ended."""
        self._closers.append(close)

    def close(self) -> None:
        while self._closers:
            self._closers.pop()()


def open_scope(scope: Scope) -> RequestScope:
    """A scope for a request that begins."""
    own = scope[_SCOPE_KEY] = RequestScope(request_id_of(scope))
    return own


def request_scope() -> RequestScope:
    """The scope of the current request."""
    return cast(RequestScope, cast(Scope, request.scope)[_SCOPE_KEY])


def request_id_of(scope: Scope) -> str:
    """What the request is called, in its answer, its log line and in error texts; always the same."""
    if _ID_KEY not in scope:
        sent = next((value for name, value in scope["headers"] if name.lower() == _ID_HEADER), None)
        scope[_ID_KEY] = choose_request_id(None if sent is None else sent.decode("latin1"))
    return cast(str, scope[_ID_KEY])


def set_fault(scope: Scope, fault: RequestError) -> None:
    """The protocol has refused a request that the framework is working at; its log line is to tell."""
    scope[_FAULT_KEY] = fault


def fault_of(scope: Scope) -> RequestError | None:
    return cast("RequestError | None", scope.get(_FAULT_KEY))
