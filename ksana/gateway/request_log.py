"""The log's one line per request. Nothing a client sent can break the line or tell a terminal something.

A request that was refused, or failed under way, has the field at fault, the error's code and the reason.
Reasons are our own texts; where one quotes, it is cut. What may quote a prompt is left out.
"""

from __future__ import annotations

import logging

from ksana.errors import RequestError, ServiceError

log = logging.getLogger("ksana.gateway")

_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
_MAX_METHOD = 20
_MAX_PATH = 200
_MAX_PARAM = 120
_MAX_REASON = 300

_QUOTING_CODE = "chat_template_error"
"""Behind the colon stands what a template said, which may be what it was reading."""


def log_request(
    *,
    method: str,
    path: str,
    status: int | None,
    is_complete: bool,
    duration_s: float,
    request_id: str,
    refusal: RequestError | ServiceError | None,
) -> None:
    """`status` is what was sent, if anything was; `refusal` why it is no good answer, if it is none."""
    is_quiet = refusal is None and path in _QUIET_PATHS
    log.log(
        logging.DEBUG if is_quiet else logging.INFO,
        "%s %s %s%s %.1f ms %s%s",
        _escaped(method, _MAX_METHOD),
        ascii(path if len(path) <= _MAX_PATH else path[:_MAX_PATH] + "..."),
        "-" if status is None else status,
        "" if is_complete else " (client left)",
        duration_s * 1000,
        request_id,
        "" if refusal is None else _told(refusal, status),
    )


def _told(refusal: RequestError | ServiceError, status: int | None) -> str:
    # A stream that fails had its status long before.
    parts = [] if status in (None, refusal.status) else [f"failed={refusal.status}"]
    if refusal.param is not None:
        parts.append(f"param={_escaped(refusal.param, _MAX_PARAM)}")
    parts.append(f"code={_escaped(refusal.code or refusal.type, _MAX_PARAM)}")
    reason = refusal.message
    if refusal.code == _QUOTING_CODE:
        reason = reason.partition(":")[0]
    return f' {" ".join(parts)} reason="{_escaped(reason, _MAX_REASON)}"'


def _escaped(text: str, most: int) -> str:
    """`text` in printable ASCII without bare double quotes, cut after `most` characters."""
    cut = text if len(text) <= most else text[:most] + "..."
    return cut.encode("unicode_escape").decode("ascii").replace('"', '\\"')
