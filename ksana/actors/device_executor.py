"""The device executor: keeps one worker alive and speaks for it.

Receives  `StepPlan` from the scheduler; `CopyFromStaging` and `CopyToStaging` from the remote-cache loader.
Sends     `StepDone`, `WorkerLost` and `WorkerReady` to the scheduler; `StagingCopied` to the remote-cache
          loader.
Owns      the backend (and so the worker) and its pool epoch.
Never     changes or reorders orders; forwards an order to a worker of another epoch; decides what becomes
          of requests.
If it fails  the generation ends: see `ksana.runtime.supervisor`; the next one begins with a new worker.

A worker that dies, or that has not answered an order for `step_timeout_s`, is replaced at once. After
`MAX_RESTARTS` restarts within `RESTARTS_WITHIN_S` without a good step in between, or `MAX_FAILED_STARTS`
starts in a row that brought up no worker, it says `WorkerLost(restarting=False)` and tries again only
every `SLOW_RETRY_S`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import trio

from ksana.devices.backend import Answer, Backend, WorkerInfo, WorkerLostError
from ksana.errors import InvariantViolated, ModelLoadError
from ksana.messages.base import Message, PoolEpoch
from ksana.messages.staging import CopyFromStaging, CopyToStaging, StagingCopied
from ksana.messages.status import WorkerState
from ksana.messages.steps import StepPlan, WorkerLost, WorkerReady
from ksana.runtime.actor import Address, Post, Said, Tap
from ksana.runtime.clock import now_s
from ksana.runtime.mailbox import Mailbox
from ksana.runtime.restarts import RestartLimiter

log = logging.getLogger(__name__)

MAX_RESTARTS = 16
"""More than the 13 crashes in a row that finding one bad request among 4,096 by halves can take."""
RESTARTS_WITHIN_S = 600.0
MAX_FAILED_STARTS = 4
SLOW_RETRY_S = 30.0


class DeviceExecutor:
    """Outlives generations of actors, as its epoch must never repeat; `run` is one generation's task."""

    def __init__(
        self,
        backend: Backend,
        mailbox: Mailbox[Message],
        *,
        scheduler: Post,
        step_timeout_s: float,
        remote_cache_loader: Post | None = None,
        tap: Tap | None = None,
    ) -> None:
        """`remote_cache_loader` is told of copies done; without a remote cache there are none."""
        self.epoch: PoolEpoch = 0
        self.state: WorkerState = "stopped"
        self.num_restarts = 0
        self._backend = backend
        self._mailbox = mailbox
        self._post: dict[Address, Post] = {"scheduler": scheduler}
        if remote_cache_loader is not None:
            self._post["remote_cache_loader"] = remote_cache_loader
        self._step_timeout_s = step_timeout_s
        self._tap = tap
        self._limiter = RestartLimiter(MAX_RESTARTS, RESTARTS_WITHIN_S)
        self._num_failed_starts = 0
        self._in_flight = 0
        self._answer_due = trio.CancelScope()

    async def run(self) -> None:
        """Serve until the mailbox is closed (which counts once a worker is up) or the task is cancelled."""
        while True:
            if self.state != "ready":
                await self._restart()
            self._say(WorkerReady(pool_epoch=self.epoch))
            reason = await self._serve()
            if reason is None:
                return
            log.error("worker of epoch %d lost: %s", self.epoch, reason)
            await self._backend.stop()
            self._lose(reason)

    async def start_first(self) -> WorkerInfo:
        """Bring up the first worker; returns what it says of itself.

        Raises ModelLoadError or WorkerLostError: an engine that never worked does not retry.
        """
        self.epoch += 1
        info = await self._backend.start(self.epoch)
        self.state = "ready"
        return info

    async def stop(self) -> None:
        """Stop the worker, in bounded time."""
        self.state = "stopped"
        await self._backend.stop()

    def forget_worker(self) -> None:
        """The actors broke: the worker's state cannot be trusted, so the next `run` replaces it."""
        if self.state == "ready":
            self.state = "restarting"

    async def _restart(self) -> None:
        """Bring up the next worker, however long it takes. Sets state and epoch."""
        while True:
            if self.state == "given_up":
                await trio.sleep(SLOW_RETRY_S)
            self.epoch += 1
            self.num_restarts += 1
            try:
                await self._backend.start(self.epoch)
            except (ModelLoadError, WorkerLostError) as error:
                log.error("worker of epoch %d did not start: %s", self.epoch, error)
                self._num_failed_starts += 1
                self._lose(str(error))
            else:
                self._num_failed_starts = 0
                self.state = "ready"
                return

    def _lose(self, reason: str) -> None:
        if self.state != "given_up":
            hopeless = self._num_failed_starts >= MAX_FAILED_STARTS or not self._limiter.allow(now_s())
            self.state = "given_up" if hopeless else "restarting"
            if hopeless:
                log.critical("the worker keeps dying or does not start: trying on, but slowly")
        self._say(WorkerLost(pool_epoch=self.epoch, reason=reason, restarting=self.state == "restarting"))

    async def _serve(self) -> str | None:
        """Carry plans and answers until the worker is lost (says why) or the mailbox closes (None)."""
        self._in_flight = 0
        reason: str | None = None
        async with trio.open_nursery() as nursery:

            async def forward() -> None:
                await self._forward_orders()
                nursery.cancel_scope.cancel()

            nursery.start_soon(forward)
            reason = await self._receive_answers()
            nursery.cancel_scope.cancel()
        return reason

    async def _forward_orders(self) -> None:
        while True:
            try:
                messages = await self._mailbox.drain()
            except trio.EndOfChannel:
                return
            self._record(messages, ())
            for message in messages:
                if not isinstance(message, StepPlan | CopyFromStaging | CopyToStaging):
                    raise InvariantViolated(f"the executor was sent a {type(message).__name__}")
                if message.pool_epoch == self.epoch:
                    if self._in_flight == 0:
                        self._answer_due.deadline = now_s() + self._step_timeout_s
                    self._in_flight += 1
                    await self._backend.submit(message)

    async def _receive_answers(self) -> str:
        while True:
            done: Answer | None = None
            with trio.CancelScope() as self._answer_due:
                self._answer_due.deadline = now_s() + self._step_timeout_s if self._in_flight else math.inf
                try:
                    done = await self._backend.receive()
                except WorkerLostError as error:
                    return str(error)
            if done is None:
                return f"no step was done in {self._step_timeout_s:.0f} s"
            self._in_flight -= 1
            if isinstance(done, StagingCopied):
                self._say(done, "remote_cache_loader")
            else:
                self._limiter.forgive()
                self._say(done)

    def _say(self, message: Message, to: Address = "scheduler") -> None:
        self._record((), ((to, message),))
        self._post[to](message)

    def _record(self, messages: Sequence[Message], said: Sequence[Said]) -> None:
        if self._tap is not None:
            self._tap("executor", now_s(), messages, said)
