"""A device executor that wakes no task for a step: on a virtual clock it is called when one is done."""

from __future__ import annotations

from ksana.actors.device_executor import DeviceExecutor
from ksana.devices.backend import WorkerLostError
from ksana.devices.simulated import SimulatedBackend
from ksana.errors import InvariantViolated
from ksana.messages.base import Message
from ksana.messages.staging import CopyFromStaging, CopyToStaging, StagingCopied
from ksana.messages.steps import StepPlan
from ksana.runtime.actor import Post, Tap
from ksana.runtime.mailbox import Mailbox
from ksana.runtime.virtual_clock import VirtualClock


class LeanExecutor(DeviceExecutor):
    """Does what a `DeviceExecutor` with a `SimulatedBackend` does, at the same times, for less.

    Orders come by `post`, not through a mailbox. Workers start, die and are replaced as ever.
    """

    def __init__(
        self,
        backend: SimulatedBackend,
        *,
        scheduler: Post,
        step_timeout_s: float,
        remote_cache_loader: Post | None = None,
        tap: Tap | None = None,
    ) -> None:
        super().__init__(
            backend,
            Mailbox("executor, not used", 1),
            scheduler=scheduler,
            step_timeout_s=step_timeout_s,
            remote_cache_loader=remote_cache_loader,
            tap=tap,
        )
        self._simulated = backend
        self._clock: VirtualClock
        self._is_serving = False
        self._num_begun = 0
        """Orders begun. A call for an older one comes too late: its worker died meanwhile."""
        self._error: Exception | None = None

    def post(self, message: Message) -> None:
        """Take an order. One for another worker is dropped."""
        self._record((message,), ())
        if not isinstance(message, StepPlan | CopyFromStaging | CopyToStaging):
            raise InvariantViolated(f"the executor was sent a {type(message).__name__}")
        if self._is_serving and message.pool_epoch == self.epoch and self._simulated.add(message):
            self._begin(is_first=True)

    async def _serve(self) -> str:
        """Until the worker is lost: why. Raises what a step has raised."""
        self._clock = VirtualClock.current()
        self._is_serving = True
        try:
            await self._simulated.killed.wait()
        finally:
            self._is_serving = False
            self._num_begun += 1
        if self._error is not None:
            raise self._error
        return self._simulated.why_killed

    def _begin(self, *, is_first: bool) -> None:
        seconds = self._simulated.begin(is_first=is_first)
        self._num_begun += 1
        number = self._num_begun
        clock = self._clock
        if seconds > self._step_timeout_s:
            clock.call_at(clock.current_time() + self._step_timeout_s, lambda: self._give_up(number))
        else:
            clock.call_at(clock.current_time() + seconds, lambda: self._finish(number))

    def _finish(self, number: int) -> None:
        if number != self._num_begun:
            return
        try:
            done = self._simulated.finish()
            if isinstance(done, StagingCopied):
                self._say(done, "remote_cache_loader")
            else:
                self._limiter.forgive()
                self._say(done)
            if self._simulated.has_orders:
                self._begin(is_first=False)
        except WorkerLostError:
            pass  # `_serve` is awake
        except Exception as error:  # told by `_serve`: an exception here would end trio itself
            self._error = error
            self._simulated.kill(str(error))

    def _give_up(self, number: int) -> None:
        if number == self._num_begun:
            self._simulated.kill(f"no step was done in {self._step_timeout_s:.0f} s")
