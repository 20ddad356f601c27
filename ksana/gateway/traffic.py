"""Which requests are being answered: what a shutdown waits for, and then ends."""

from __future__ import annotations

import trio

from ksana.errors import ServiceError
from ksana.gateway.outputs import Outputs


class Traffic:
    """All `Outputs` being read. Invariant: `idle` is set exactly while there are none."""

    def __init__(self) -> None:
        self.draining = False
        self._open: dict[int, Outputs] = {}
        self._idle = trio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._open)

    def check_open(self) -> None:
        """Raises ServiceError 503 once the server is shutting down."""
        if self.draining:
            raise shutting_down()

    def add(self, outputs: Outputs) -> None:
        self._open[id(outputs)] = outputs
        if self._idle.is_set():
            self._idle = trio.Event()

    def remove(self, outputs: Outputs) -> None:
        """May be called twice."""
        if self._open.pop(id(outputs), None) is not None and not self._open:
            self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def end_all(self) -> None:
        """Tell every reader that the server is shutting down."""
        for outputs in list(self._open.values()):
            outputs.end(shutting_down())


def shutting_down() -> ServiceError:
    return ServiceError("the server is shutting down", status=503, retry_after_s=5, code="shutting_down")
