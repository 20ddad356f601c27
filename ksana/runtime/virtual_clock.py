"""A clock on which nothing ever waits: when all tasks sleep, time jumps to the next deadline.

For simulations and tests. Time passes only by sleeping; computing takes none. Nothing else may wake the
run (threads, sockets): while such work is in flight virtual time would run away.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Self

import trio


class VirtualClock(trio.abc.Clock):
    """Give it to `trio.run(..., clock=VirtualClock())`. A sleep costs 15 µs or more, a `call_at` 2."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        """A heap, by time, then in the order of asking."""
        self._num_calls = 0

    @classmethod
    def current(cls) -> Self:
        """The one of the running `trio.run`. RuntimeError when that has another clock."""
        clock = trio.lowlevel.current_clock()
        if not isinstance(clock, cls):
            raise RuntimeError(f"trio runs on a {type(clock).__name__}, not a virtual one")
        return clock

    def call_at(self, at_s: float, call: Callable[[], None]) -> None:
        """Have `call` called when that time has come (at once, if it is past) and no task can run.

        A task that sleeps costs more than ten times as much. `call` belongs to no task: it cannot wait, and
        what it raises ends the run with `trio.TrioInternalError`, so it catches what it wants told better.
        Whoever does not want it any more lets it do nothing.
        """
        heappush(self._calls, (at_s, self._num_calls, call))
        self._num_calls += 1

    def start_clock(self) -> None:
        """Nothing to start."""

    def current_time(self) -> float:
        return self._now_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        # trio asks only when no task can run: the time has come to go on to the deadline.
        calls = self._calls
        if calls and calls[0][0] <= deadline:
            self._now_s = max(self._now_s, calls[0][0])
            while calls and calls[0][0] <= self._now_s:
                heappop(calls)[2]()
            return 0.0
        if math.isinf(deadline):
            return deadline
        self._now_s = max(self._now_s, deadline)
        return 0.0
