"""h11, stricter about heads, and with words for what it refuses."""

from __future__ import annotations

import re

import h11

from ksana.gateway.host import fault_of_host
from ksana.gateway.limits import MAX_HEADER_BYTES


def fault_of(request: h11.Request) -> tuple[int, str] | None:
    """The status and text with which a request is refused for its head, which h11 found well-formed."""
    if not request.http_version.startswith(b"1."):
        return 505, "this server speaks HTTP/1.1"
    if len(request.target) > MAX_HEADER_BYTES:
        return 414, TOO_LARGE[414]
    if (
        len(request.target) + sum(len(name) + len(value) + 4 for name, value in request.headers)
        > MAX_HEADER_BYTES
    ):
        return 431, TOO_LARGE[431]
    names = {name for name, _ in request.headers}
    for name, value in request.headers:
        if name == b"host" and (fault := fault_of_host(value)) is not None:
            return 400, fault
    # h11 would go by Transfer-Encoding. Whoever stands before us may not, and see other requests than we do.
    if b"transfer-encoding" in names and b"content-length" in names:
        return 400, "a request has Content-Length or Transfer-Encoding, not both"
    if b"transfer-encoding" in names and request.http_version == b"1.0":
        return 400, "HTTP/1.0 has no Transfer-Encoding"
    return None


TOO_LARGE = {
    414: f"the URI is longer than {MAX_HEADER_BYTES} bytes",
    431: f"the headers are larger than {MAX_HEADER_BYTES} bytes",
}


_REQUEST_LINE = re.compile(rb"\s*([A-Za-z]{1,20}) ([!-~]+)")
_QUOTATION = re.compile(r":? *(?:b?['\"]|bytearray|b\()")
_MAX_TOLD = 300
_MAX_REASON = 80
_CUT_OFF = "the client stopped sending before its request was whole"


class StrictConnection(h11.Connection):
    """h11 that also refuses what `fault_of` finds.

    `refused` is the request whose head is at fault, `fault` the text, `request_line` where a head that is
    none begins: its method and path, as far as they can be told.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
        self.refused: h11.Request | None = None
        self.fault = ""
        self._head = b""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.their_state is h11.IDLE:
            self._head = self.trailing_data[0][:_MAX_TOLD]
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if str(error).startswith("peer "):  # "... unexpectedly closed connection" and the like
                self.fault = _CUT_OFF
            elif error.error_status_hint not in TOO_LARGE:
                self.fault = f"this is not a valid HTTP request ({_unquoted(str(error))})"
            raise
        if isinstance(event, h11.Request) and (fault := fault_of(event)) is not None:
            self.refused = event
            status, self.fault = fault
            raise h11.RemoteProtocolError(self.fault, error_status_hint=status)
        return event

    @property
    def request_line(self) -> tuple[str, str]:
        """Method and path of what was to be a head."""
        if self.refused is not None:
            method, target = self.refused.method, self.refused.target
        else:
            found = _REQUEST_LINE.match(self._head)
            method, target = found.groups() if found else (b"?", b"?")
        return method.decode("latin1"), target.partition(b"?")[0].decode("latin1") or "?"


def _unquoted(text: str) -> str:
    """h11's text without what it quotes: that is the client's, and may be a secret."""
    return _QUOTATION.split(text, maxsplit=1)[0][:_MAX_REASON]
