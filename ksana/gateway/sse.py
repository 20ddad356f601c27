"""Server-sent events as OpenAI's clients read them: `data: <JSON>` and an empty line."""

from __future__ import annotations

from typing import Any

import msgspec

CONTENT_TYPE = "text/event-stream; charset=utf-8"

DONE = b"data: [DONE]\n\n"
"""The last event of a stream that ended well; a stream that failed has none."""

PING = b": ping\n\n"
"""A comment: clients skip it."""

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""No proxy may hold events back."""

encode_json = msgspec.json.Encoder().encode


_LINE_BREAKS = [(letter.encode(), b"\\u%04x" % ord(letter)) for letter in "\x85\u2028\u2029"]


def encode_line(value: Any) -> bytes:
    """JSON on one line, also for clients that split lines where Unicode does and not only at \\n."""
    line = encode_json(value)
    if not line.isascii():
        for raw, escaped in _LINE_BREAKS:
            line = line.replace(raw, escaped)
    return line


def event(value: Any) -> bytes:
    """One event."""
    return b"data: " + encode_line(value) + b"\n\n"
