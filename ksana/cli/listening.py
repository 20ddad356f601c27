"""Finding out whether an address can be listened at before anything long begins."""

from __future__ import annotations

import os
import socket

from ksana.errors import ConfigError


def check_can_listen(host: str, port: int) -> None:
    """Listen for a moment at every address of `host`, as the server will. Raises ConfigError.

    Somebody else may take the port while the model loads; then the server says so. It is not kept open
    meanwhile, because clients would connect and hang instead of being told that nothing is there yet.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise ConfigError(f"--host {host[:80]!r} is no address or name that is known here") from None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(address)
                probe.listen(1)
            except OSError as error:
                raise ConfigError(
                    f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}; "
                    "choose another with --port, or --port 0 for any that is free"
                ) from None
