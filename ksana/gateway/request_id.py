"""What a request is called: the client's `X-Request-Id` if it is fit for a log, else one of ours."""

from __future__ import annotations

import re
import secrets

from ksana.gateway.limits import MAX_REQUEST_ID

HEADER = "X-Request-Id"

_FIT = re.compile(rf"[A-Za-z0-9._:/+=@-]{{1,{MAX_REQUEST_ID}}}")


def choose_request_id(sent: str | None) -> str:
    """`sent` itself, or a fresh id where there is none or it holds anything but plain letters and signs."""
    if sent is not None and _FIT.fullmatch(sent):
        return sent
    return secrets.token_hex(16)
