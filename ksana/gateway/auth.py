"""API keys: who may ask, compared without telling by the time it takes how much of a key was right."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from ksana.errors import RequestError

OPEN_PATHS = frozenset({"/health", "/ready"})
"""What probes ask for, and nothing else answers without a key."""


class ApiKeys:
    """The accepted keys; with none of them, everybody is let in."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, authorization: str | None) -> str:
        """The salt that keeps one key's cached prompts from another's; empty without keys.

        `authorization` is the request's header. Raises RequestError 401.
        """
        if not self._digests:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip())
        # All keys are compared, whichever matches.
        known = [hmac.compare_digest(digest, one) for one in self._digests]
        if scheme.lower() != "bearer" or not any(known):
            text = "wrong API key" if authorization else "no API key; send it as 'Authorization: Bearer KEY'"
            raise RequestError(text, status=401, code="invalid_api_key", type="authentication_error")
        return hashlib.sha256(b"ksana cache salt\0" + key.strip().encode()).hexdigest()[:32]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
