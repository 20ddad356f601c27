"""A backend without a device: steps take the time a cost model says, on whatever clock trio runs on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from ksana.costs.step_cost import LinearStepCost, StepCost, step_shape
from ksana.devices.backend import Answer, Order, Runner, WorkerInfo, WorkerLostError
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


_STOPPED = "the simulated worker is stopped"


class SimulatedBackend:
    """A `Backend` on simulated time. No threads, no processes, no torch.

    `submit` and `receive` are for an executor's tasks. An executor without tasks calls what these are made
    of, in turn: `add`, `begin` and, so many seconds later, `finish`.
    """

    def __init__(
        self,
        build: Callable[[], Runner],
        *,
        cost: StepCost | None = None,
        start_time_s: float = 2.0,
        fault: Fault | None = None,
        start_fault: StartFault | None = None,
        copy_s_per_block: float = 1e-4,
        host_s: float = 0.0,
        is_up_at_first: bool = False,
    ) -> None:
        """`build` makes the worker with empty pools, usually a `SimulatedWorker`. `host_s`: what the engine
        itself needs before an order begins that no other one was in front of. `is_up_at_first`: the worker of
        the first epoch takes no time to start."""
        self._build = build
        self._cost: StepCost = LinearStepCost() if cost is None else cost
        self._start_time_s = start_time_s
        self._fault = fault
        self._start_fault = start_fault
        self._copy_s_per_block = copy_s_per_block
        self._host_s = host_s
        self._is_up_at_first = is_up_at_first
        self._runner: Runner | None = None
        self._orders: deque[Order] = deque()
        self._wakeup = trio.Event()
        self._seconds = 0.0
        """What the oldest order takes, and why the worker dies of it."""
        self._reason: str | None = None
        self.slowdown = 1.0
        """Factor on the time of every order that begins from now on."""
        self.killed = trio.Event()
        """Set when the worker dies."""
        self.why_killed = _STOPPED
        self.num_steps_begun = 0
        self.num_starts = 0

    async def start(self, epoch: PoolEpoch) -> WorkerInfo:
        await self.stop()
        self.num_starts += 1
        if epoch > 1 or not self._is_up_at_first:
            await trio.sleep(self._start_time_s)
        reason = None if self._start_fault is None else self._start_fault(epoch)
        if reason is not None:
            raise ModelLoadError(reason) if reason.startswith("model: ") else WorkerLostError(reason)
        self._runner = self._build()
        self.killed = trio.Event()
        return WorkerInfo(device="simulated", load_time_s=self._start_time_s)

    async def submit(self, order: Order) -> None:
        self.add(order)
        self._wakeup.set()
        await trio.lowlevel.checkpoint()

    async def receive(self) -> Answer:
        is_first = not self._orders
        while not self._orders:
            if self._runner is None:
                raise WorkerLostError(self.why_killed)
            self._wakeup = trio.Event()
            await self._wakeup.wait()
        seconds = self.begin(is_first=is_first)
        with trio.move_on_after(seconds):
            await self.killed.wait()
        return self.finish()

    def add(self, order: Order) -> bool:
        """Queue an order; a dead worker takes none. Whether it is the only one, and so to be begun."""
        if self._runner is None:
            return False
        self._orders.append(order)
        return len(self._orders) == 1

    def begin(self, *, is_first: bool) -> float:
        """Begin the oldest order: the seconds until it is done. `is_first`: none was in front of it."""
        order = self._orders[0]
        self._reason = None
        if isinstance(order, StepPlan):
            seconds = self._cost.seconds(step_shape(order))
            self.num_steps_begun += 1
            if self._fault is not None:
                self._reason = self._fault(self.num_steps_begun, order)
        else:
            seconds = self._copy_s_per_block * len(order.blocks)
        self._seconds = seconds * self.slowdown
        return self._seconds + self._host_s if is_first else self._seconds

    def finish(self) -> Answer:
        """The oldest order is done. Raises WorkerLostError when the worker died meanwhile, or dies now."""
        if self._reason is not None:
            self.kill(self._reason)
        if self._runner is None:
            raise WorkerLostError(self.why_killed)
        order = self._orders.popleft()
        if not isinstance(order, StepPlan):
            return self._runner.copy_staged(order)
        done = self._runner.run(order)
        return StepDone(
            pool_epoch=done.pool_epoch,
            step_id=done.step_id,
            results=done.results,
            times=StepTimes(prepare_ns=0, forward_ns=round(self._seconds * 1e9), sample_ns=0),
        )

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    def kill(self, reason: str = _STOPPED) -> None:
        """The worker dies now, in the middle of whatever it does."""
        if self._runner is not None:
            self.why_killed = reason
        self._runner = None
        self._reason = None
        self._orders.clear()
        self.killed.set()
        self._wakeup.set()

    async def stop(self) -> None:
        self.kill()
        await trio.lowlevel.checkpoint()
