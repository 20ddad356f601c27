"""Which web pages may call this server from a browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_METHODS = "GET, POST, OPTIONS"
_HEADERS = "Authorization, Content-Type, X-Request-Id"
_EXPOSED = "X-Request-Id, Retry-After"
_MAX_AGE_S = "600"


class Cors:
    """The answers to a browser's question whether a page of `origin` may read ours."""

    def __init__(self, allowed_origins: Sequence[str]) -> None:
        self._all = "*" in allowed_origins
        self._origins = frozenset(origin.rstrip("/") for origin in allowed_origins)

    def __bool__(self) -> bool:
        return self._all or bool(self._origins)

    def headers(self, origin: str | None) -> Mapping[str, str]:
        """What every answer to a page of `origin` carries; without an allowed origin only `Vary`."""
        if not self:
            return {}
        headers = {} if self._all else {"Vary": "Origin"}
        if origin is not None and (self._all or origin in self._origins):
            headers["Access-Control-Allow-Origin"] = "*" if self._all else origin
            headers["Access-Control-Expose-Headers"] = _EXPOSED
        return headers

    def preflight(self, origin: str | None) -> Mapping[str, str]:
        """What an OPTIONS request with Access-Control-Request-Method is answered with."""
        headers = dict(self.headers(origin))
        if "Access-Control-Allow-Origin" in headers:
            headers["Access-Control-Allow-Methods"] = _METHODS
            headers["Access-Control-Allow-Headers"] = _HEADERS
            headers["Access-Control-Max-Age"] = _MAX_AGE_S
        return headers
