"""Signals: stop loading, drain, hurry, leave. Real signals to this very process, harmless while watched."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

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


@pytest.fixture(autouse=True)
def _terminal() -> Iterator[None]:
    """Whoever runs the tests may do it under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


async def send(number: signal.Signals, *, after_s: float = module.ECHO_S) -> None:
    await trio.sleep(after_s)
    os.kill(os.getpid(), number)
    await trio.testing.wait_all_tasks_blocked(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGHUP, 0), (signal.SIGINT, 130)])
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


@pytest.mark.parametrize(
    "numbers",
    [
        [signal.SIGTERM] * 3,
        [signal.SIGHUP] * 3,
        [signal.SIGTERM, signal.SIGHUP],  # systemd with SendSIGHUP=yes
        [signal.SIGHUP, signal.SIGTERM],
    ],
)
async def test_what_comes_twice_at_once_is_one(
    nursery: trio.Nursery, exits: list[int], numbers: list[signal.Signals]
) -> None:
    shutdown, server = Shutdown(), FakeServer()
    await nursery.start(shutdown.watch)
    shutdown.serving(server)
    for number in numbers:
        await send(number, after_s=0)
    assert server.stop.is_set()
    assert not server.hurry.is_set()
    await send(signal.SIGTERM)
    assert server.hurry.is_set()
    assert exits == []


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
async def test_a_second_signal_of_any_kind_hurries(
    nursery: trio.Nursery, exits: list[int], first: signal.Signals, second: signal.Signals
) -> None:
    shutdown, server = Shutdown(), FakeServer()
    await nursery.start(shutdown.watch)
    shutdown.serving(server)
    await send(first)
    assert not server.hurry.is_set()
    await send(second)
    assert server.hurry.is_set()
    assert exits == []


async def test_under_nohup_a_hangup_is_still_ignored(nursery: trio.Nursery) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    shutdown, server = Shutdown(), FakeServer()
    await nursery.start(shutdown.watch)
    shutdown.serving(server)
    await send(signal.SIGHUP)
    assert not server.stop.is_set()
    await send(signal.SIGTERM)
    assert server.stop.is_set()
    assert not server.hurry.is_set()
