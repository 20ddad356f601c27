"""Bounds on what a client may send. Every one is checked before anything of that size is allocated."""

from __future__ import annotations

MAX_HEADER_BYTES = 32 << 10
"""Request line and headers together."""

IDLE_TIMEOUT_S = 60.0
"""A connection may be idle this long, before its first request and between two."""

HEAD_TIMEOUT_S = 15.0
"""From the first byte of a request line to the end of the headers."""

BODY_TIMEOUT_S = 60.0
"""From the end of the headers to the end of the body."""

BODY_GRACE_S = 5.0
"""When connections run out, a body that has been coming for longer than this may be given up."""

SEND_TIMEOUT_S = 30.0
"""For `SEND_PIECE_BYTES` to leave for a client that reads slowly; then the connection is closed."""

SEND_PIECE_BYTES = 64 << 10

MAX_BODIES_BYTES = 256 << 20
"""Of all bodies together that are not whole and decoded yet; but one of --max-body-bytes always fits."""

LINGER_S = 2.0
LINGER_BYTES = 32 << 20
"""After a refusal in the middle of a body, what is still read and dropped, so that the client sees it."""

PROBE_EVERY_S = 1.0
"""A client that sends nothing more is written to at once, after this long, after twice that, and so on."""

PING_INTERVAL_S = 15.0
"""An event stream that has been silent this long gets a comment, so that proxies keep it open."""

MAX_PROMPTS = 128
"""Prompts in one request to /v1/completions."""

MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 1024

MAX_TOKEN_ID = (1 << 31) - 1
"""Ids are checked against the vocabulary by the engine; this keeps them machine-sized until then."""

MAX_CACHE_SALT = 256
MAX_METADATA = 64
MAX_USER_LENGTH = 1024
MAX_REQUEST_ID = 128

EXTRA_CONNECTIONS = 512
"""Connections beyond one for each request that may run or wait: idle ones, health checks, refusals."""

REFUSAL_LOG_EVERY_S = 1.0
"""Connections beyond that are told of in one line for all."""

ENGINE_GRACE_S = 30.0
"""The engine ends every request by its deadline; this much later the gateway stops waiting for it."""

CLOSE_GRACE_S = 2.0
"""After the drain timeout: what open streams get to write that the server is shutting down."""
