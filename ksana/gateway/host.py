"""Whether a `Host` header is one: a name, an IPv4 address or an IPv6 address in brackets, and maybe a port.

Nothing here depends on what the header says, but RFC 9112 (3.2) wants a 400 for an invalid one, and what
stands below or above us may trust it. Names are RFC 3986's, with the lengths that DNS allows.
"""

from __future__ import annotations

import ipaddress
import re

MAX_NAME = 253
MAX_LABEL = 63

_FORM = re.compile(r"(?P<host>\[[^\[\]]*\]|[^:\[\]]*)(?::(?P<port>[0-9]{0,5}))?")
_NAME = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*")


def fault_of_host(value: bytes) -> str | None:
    """What is wrong with the value of a `Host` header; None for a valid one. An empty one is valid."""
    found = _FORM.fullmatch(value.decode("latin1"))
    if found is None or int(found["port"] or 0) > 65535:
        return "the Host header is no host with or without a port"
    host = found["host"]
    if host.startswith("["):
        return None if _is_ipv6(host[1:-1]) else "the Host header has no IPv6 address in its brackets"
    if not _NAME.fullmatch(host):
        return "the Host header has characters that no host's name has"
    labels = host.removesuffix(".").split(".")
    if len(host) > MAX_NAME + host.endswith(".") or any(len(label) > MAX_LABEL for label in labels):
        return f"the name in the Host header is longer than {MAX_NAME} or a part of it than {MAX_LABEL}"
    if host and not all(labels):
        return "the name in the Host header has an empty part"
    return None


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return text.isascii() and text.isprintable()
