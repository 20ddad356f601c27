"""Signals: stop loading, drain, hurry, leave. Real signals to this very process, harmless while watched."""

from __future__ import annotations

import os
import signal

import pytest
import trio
import trio.testing

from ksana.cli import shutdown as module
from ksana.cli.shutdown import Shutdown


class FakeServer:
    def __init__(self) -> None:
        self.stop = trio.Event()
        self.hurry = trio.Event()


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    codes: list[int] = []
    monkeypatch.setattr(module.os, "_exit", codes.append)
    return codes


async def send(number: signal.Signals, *, after_s: float = module.ECHO_S) -> None:
    await trio.sleep(after_s)
    os.kill(os.getpid(), number)
    await trio.testing.wait_all_tasks_blocked(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_while_loading_stops_it(
    nursery: trio.Nursery, exits: list[int], number: signal.Signals
) -> None:
    shutdown = Shutdown()
    await nursery.start(shutdown.watch)
    with shutdown.loading:
        await send(number)
        await trio.sleep(5)
    assert shutdown.loading.cancelled_caught
    assert shutdown.exit_code == 128 + number
    await send(number)
    assert exits == [128 + number]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
async def test_the_first_drains_the_second_hurries_the_third_leaves(
    nursery: trio.Nursery, exits: list[int], number: signal.Signals, code: int
) -> None:
    shutdown, server = Shutdown(), FakeServer()
    await nursery.start(shutdown.watch)
    shutdown.serving(server)
    await send(number)
    assert server.stop.is_set()
    assert not server.hurry.is_set()
    assert shutdown.exit_code == code
    await send(number)
    assert server.hurry.is_set()
    assert exits == []
    await send(number)
    assert exits == [128 + number]


async def test_a_server_that_cannot_hurry_is_left(
    nursery: trio.Nursery, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HURRY_S", 0.01)
    shutdown, server = Shutdown(), FakeServer()
    await nursery.start(shutdown.watch)
    shutdown.serving(server)
    await send(signal.SIGTERM)
    await send(signal.SIGTERM)
    await trio.sleep(0.05)
    assert exits == [1]


async def test_a_sigterm_that_comes_twice_at_once_is_one(nursery: trio.Nursery, exits: list[int]) -> None:
    shutdown, server = Shutdown(), FakeServer()
    await nursery.start(shutdown.watch)
    shutdown.serving(server)
    for _ in range(3):
        await send(signal.SIGTERM, after_s=0)
    assert server.stop.is_set()
    assert not server.hurry.is_set()
    await send(signal.SIGTERM)
    assert server.hurry.is_set()
    assert exits == []
