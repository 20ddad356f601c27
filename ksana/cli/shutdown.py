"""What SIGTERM, SIGHUP (the terminal is gone) and Ctrl-C do to `ksana serve`.

While the model loads, a signal stops the loading. Later the first one drains: new requests are refused,
running ones end or time out. The second one, of whatever kind, ends all streams with an error, and the
process with them. A SIGHUP that is ignored when the server starts, as under nohup, stays ignored.

A SIGTERM or SIGHUP often comes twice at once: to the whole process group, as from timeout, systemd (which may
send one after the other) or a terminal that closes, and from a parent such as make or a shell that sends on
what it got itself. That is one wish, so the echo is dropped.
"""

from __future__ import annotations

import logging
import math
import os
import signal
from typing import Protocol

import trio

log = logging.getLogger("ksana.serve")

ECHO_S = 0.1
"""A SIGTERM or SIGHUP this soon after another is the same one."""

HURRY_S = 3.0
"""After a second signal: what the ends of open streams may take before the process just goes."""


class Stoppable(Protocol):
    """A server as far as stopping it goes: two events."""

    @property
    def stop(self) -> trio.Event: ...

    @property
    def hurry(self) -> trio.Event: ...


class Shutdown:
    """Run `watch` in a nursery; put loading under `loading`; say `serving(server)` once there is a server."""

    def __init__(self) -> None:
        self.loading = trio.CancelScope()
        self.exit_code = 0
        """0 for a drained server; 128 plus the signal's number when loading was stopped, or for Ctrl-C."""
        self._server: Stoppable | None = None
        self._num_signals = 0
        self._last_end_s = -math.inf

    def serving(self, server: Stoppable) -> None:
        self._server = server

    async def watch(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Act on signals; never returns."""
        async with trio.open_nursery() as nursery:
            with trio.open_signal_receiver(*_watched()) as signals:
                task_status.started()
                async for number in signals:
                    if number != signal.SIGINT and self._is_echo():
                        continue
                    self._num_signals += 1
                    self._act(signal.Signals(number), nursery)

    def _is_echo(self) -> bool:
        now_s = trio.current_time()
        is_echo = now_s - self._last_end_s < ECHO_S
        if not is_echo:
            self._last_end_s = now_s
        return is_echo

    def _act(self, number: signal.Signals, nursery: trio.Nursery) -> None:
        if self._server is None or number == signal.SIGINT:
            self.exit_code = 128 + number
        if self._num_signals == 1:
            if self._server is None:
                log.info("%s while loading: stopping", number.name)
                self.loading.cancel()
            else:
                log.info("%s: no new requests are taken; once more to end the running ones", number.name)
                self._server.stop.set()
        elif self._num_signals == 2 and self._server is not None:
            log.info("%s again: ending at once", number.name)
            self._server.stop.set()
            self._server.hurry.set()
            nursery.start_soon(self._leave)
        else:
            os._exit(128 + number)

    async def _leave(self) -> None:
        """The workers die with this process, and nothing here needs saving."""
        await trio.sleep(HURRY_S)
        os._exit(self.exit_code or 1)


def _watched() -> list[signal.Signals]:
    watched = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        watched.append(signal.SIGHUP)
    return watched
