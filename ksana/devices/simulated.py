"""A backend without a device: steps take the time a cost model says, on whatever clock trio runs on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from ksana.costs.step_cost import LinearStepCost, StepCost, step_shape
from ksana.devices.backend import Answer, Order, WorkerInfo, WorkerLostError
from ksana.devices.worker import Runner
from ksana.errors import ModelLoadError
from ksana.messages.base import PoolEpoch
from ksana.messages.steps import StepDone, StepPlan, StepTimes

Fault = Callable[[int, StepPlan], str | None]
"""(how many steps were begun since the engine started, plan) -> why the worker dies in this step, or None."""

StartFault = Callable[[PoolEpoch], str | None]
"""(epoch) -> why this start fails, or None."""


def crash_at_steps(*numbers: int) -> Fault:
    """The worker dies in the first, second, ... step it begins; numbers count over restarts."""
    return lambda number, _plan: f"crash planned for step {number}" if number in numbers else None


class SimulatedBackend:
    """A `Backend` on simulated time. No threads, no processes, no torch."""

    def __init__(
        self,
        build: Callable[[], Runner],
        *,
        cost: StepCost | None = None,
        start_time_s: float = 2.0,
        fault: Fault | None = None,
        start_fault: StartFault | None = None,
        copy_s_per_block: float = 1e-4,
    ) -> None:
        """`build` makes the worker with empty pools, usually a `SimulatedWorker`."""
        self._build = build
        self._cost: StepCost = LinearStepCost() if cost is None else cost
        self._start_time_s = start_time_s
        self._fault = fault
        self._start_fault = start_fault
        self._copy_s_per_block = copy_s_per_block
        self._runner: Runner | None = None
        self._plans: deque[Order] = deque()
        self._wakeup = trio.Event()
        self.num_steps_begun = 0
        self.num_starts = 0

    async def start(self, epoch: PoolEpoch) -> WorkerInfo:
        await self.stop()
        self.num_starts += 1
        await trio.sleep(self._start_time_s)
        reason = None if self._start_fault is None else self._start_fault(epoch)
        if reason is not None:
            raise ModelLoadError(reason) if reason.startswith("model: ") else WorkerLostError(reason)
        self._runner = self._build()
        return WorkerInfo(device="simulated", load_time_s=self._start_time_s)

    async def submit(self, order: Order) -> None:
        if self._runner is not None:
            self._plans.append(order)
            self._wakeup.set()
        await trio.lowlevel.checkpoint()

    async def receive(self) -> Answer:
        while not self._plans:
            if self._runner is None:
                raise WorkerLostError("the simulated worker is stopped")
            self._wakeup = trio.Event()
            await self._wakeup.wait()
        plan = self._plans[0]
        if not isinstance(plan, StepPlan):
            await trio.sleep(self._copy_s_per_block * len(plan.blocks))
            if self._runner is None:
                raise WorkerLostError("the simulated worker is stopped")
            self._plans.popleft()
            return self._runner.copy_staged(plan)
        return await self._step(plan)

    async def _step(self, plan: StepPlan) -> StepDone:
        seconds = self._cost.seconds(step_shape(plan))
        self.num_steps_begun += 1
        reason = None if self._fault is None else self._fault(self.num_steps_begun, plan)
        await trio.sleep(seconds)
        if reason is not None:
            await self.stop()
        if self._runner is None:
            raise WorkerLostError(reason or "the simulated worker is stopped")
        self._plans.popleft()
        done = self._runner.run(plan)
        return StepDone(
            pool_epoch=done.pool_epoch,
            step_id=done.step_id,
            results=done.results,
            times=StepTimes(prepare_ns=0, forward_ns=round(seconds * 1e9), sample_ns=0),
        )

    def kill(self) -> None:
        """The worker dies now, in the middle of whatever it does."""
        self._runner = None
        self._plans.clear()
        self._wakeup.set()

    async def stop(self) -> None:
        self.kill()
        await trio.lowlevel.checkpoint()
