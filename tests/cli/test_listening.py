"""A port in use is found out before the model loads."""

from __future__ import annotations

import socket

import pytest

from ksana.cli.listening import check_can_listen
from ksana.errors import ConfigError


def test_free_ports_are_free_again_afterwards() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for _ in range(2):
        check_can_listen("127.0.0.1", port)
    check_can_listen("127.0.0.1", 0)
    check_can_listen("localhost", 0)
    check_can_listen("0.0.0.0", 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_port_in_use(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on {host} port {port}: Address already in use"):
            check_can_listen(host, port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "a" * 70 + ".b", "x" * 300])
def test_addresses_that_are_not_here(host: str) -> None:
    with pytest.raises(ConfigError):
        check_can_listen(host, 0)
