"""A worker in this very process and thread: for tests and debugging. A step blocks everything else."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from ksana.devices.backend import Answer, Order, Runner, WorkerInfo, WorkerLostError
from ksana.devices.worker import carry_out
from ksana.messages.base import PoolEpoch


class InlineBackend:
    """A `Backend` that calls a runner directly. An exception of the runner is the death of the worker."""

    def __init__(self, build: Callable[[], tuple[Runner, WorkerInfo]]) -> None:
        """`build` makes a fresh runner with empty pools at every start."""
        self._build = build
        self._runner: Runner | None = None
        self._plans: deque[Order] = deque()
        self._wakeup = trio.Event()

    async def start(self, epoch: PoolEpoch) -> WorkerInfo:  # noqa: ARG002
        await self.stop()
        self._runner, info = self._build()
        return info

    async def submit(self, order: Order) -> None:
        self._plans.append(order)
        self._wakeup.set()
        await trio.lowlevel.checkpoint()

    async def receive(self) -> Answer:
        # First let everybody else act, as they would while a real worker computes.
        await trio.lowlevel.checkpoint()
        while not self._plans:
            if self._runner is None:
                raise WorkerLostError("the inline worker is stopped")
            self._wakeup = trio.Event()
            await self._wakeup.wait()
        if self._runner is None:
            raise WorkerLostError("the inline worker is stopped")
        try:
            return carry_out(self._runner, self._plans.popleft())
        except Exception as error:
            self._runner = None
            self._plans.clear()
            raise WorkerLostError(f"the step raised {type(error).__name__}: {error}") from error

    async def stop(self) -> None:
        self._runner = None
        self._plans.clear()
        self._wakeup.set()
        await trio.lowlevel.checkpoint()
