"""What is to happen when: callbacks at times of the virtual clock."""

from __future__ import annotations

from collections.abc import Callable

import trio

from ksana.runtime.virtual_clock import VirtualClock


class Agenda:
    """Callbacks in the order of their times, those of one time in the order they were entered.

    They run between tasks. A callback may enter others. What one raises comes out of `run`; none runs after
    it. Cost: a few µs each.
    """

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._failed = trio.Event()

    def at(self, time_s: float, do: Callable[[], None]) -> None:
        """Run `do` at that time; soon (but not within this call) if it is past."""

        def guarded() -> None:
            if self._error is None:
                try:
                    do()
                except Exception as error:
                    self._error = error
                    self._failed.set()

        VirtualClock.current().call_at(time_s, guarded)

    async def run(self) -> None:
        """Wait for a callback that raises, and raise it."""
        await self._failed.wait()
        assert self._error is not None
        raise self._error
