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


def event(value: Any) -> bytes:
    """One event. JSON holds no raw line break, so a value is always one line."""
    return b"data: " + encode_json(value) + b"\n\n"
