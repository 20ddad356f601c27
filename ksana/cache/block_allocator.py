"""The block allocator: answers the scheduler's one batch per step, and the remote-cache loader in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypedDict

import msgspec

from ksana.cache.block_planning import BlockPlanning, PlanningSnapshot
from ksana.cache.cache_config import CacheConfig
from ksana.cache.fa_cache import CacheTotals, FaCache, FaSnapshot
from ksana.cache.remote_calls import CallsSnapshot, RemoteCall, RemoteCalls, Said, stale_answer
from ksana.errors import InvariantViolated
from ksana.messages.base import Message, PoolEpoch
from ksana.messages.blocks import BlocksPlanned, PlanBlocks, ResetPools
from ksana.messages.remote import BlocksFilled
from ksana.messages.swa import SwaBatchDone
from ksana.messages.swa_remote import SwaAnswer


class AllocatorSnapshot(TypedDict):
    """A BlockAllocator as plain values that msgspec can write and read."""

    epoch: PoolEpoch | None
    fa: FaSnapshot
    planning: PlanningSnapshot
    remote: CallsSnapshot
    waiting: list[PlanBlocks | RemoteCall]
    totals: CacheTotals


class BlockAllocator:
    """Core of the block allocator.

    Receives  PlanBlocks and ResetPools from the scheduler; the calls of `ksana.messages.remote` from the
              remote-cache loader; the answers of the SWA cache manager.
    Sends     to the SWA cache manager (if the model has sliding layers): SwaBatch, ResetPools and what
              `ksana.messages.swa_remote` has; to the scheduler BlocksPlanned, one for each PlanBlocks of the
              current epoch; to the loader one answer for each call that has one, and BlocksFilled.
    Owns      the FA pool, the prefix tree, the block tables, the loading requests and holds.
    Never     holds two batches or calls open: what arrives meanwhile waits, in order; gives a block to two
              requests that both write it, or a block that is being loaded to anybody.
    If it fails  it has raised InvariantViolated: a bug, here or in the scheduler.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.totals = CacheTotals()
        self._epoch: PoolEpoch | None = None
        self._begin()

    def _begin(self) -> None:
        """Empty pools; nothing is open, nothing waits."""
        self.fa = FaCache(self.config, self.totals)
        self._planning = BlockPlanning(self.config, self.fa)
        self._remote = RemoteCalls(self.config, self.fa)
        self._waiting: deque[PlanBlocks | RemoteCall] = deque()

    @property
    def is_batch_open(self) -> bool:
        """Whether a PlanBlocks or a remote call waits for the SWA cache manager."""
        return self._planning.is_open or self._remote.is_open

    def next_timer_s(self) -> float | None:
        return None

    def handle(self, now_s: float, messages: Sequence[Message]) -> list[Said]:  # noqa: ARG002
        said: list[Said] = []
        for message in messages:
            said.extend(self._receive(message))
            while self._waiting and not self.is_batch_open:
                said.extend(self._begin_next(self._waiting.popleft()))
            self.fa.pool.check_sums()
        return said

    def _receive(self, message: Message) -> list[Said]:
        """Answers and resets take effect at once; what begins something waits for its turn."""
        if isinstance(message, PlanBlocks):
            self._queue_plan(message)
            return []
        if isinstance(message, RemoteCall):
            return self._queue_call(message)
        if isinstance(message, SwaBatchDone):
            if message.pool_epoch != self._epoch:
                return []  # the pools were reset after the question
            return self._planned(self._planning.swa_batch_done(message))
        if isinstance(message, SwaAnswer):
            return self._remote.swa_answer(message) if message.pool_epoch == self._epoch else []
        if isinstance(message, ResetPools):
            return self._reset_pools(message)
        raise InvariantViolated(f"the block allocator was sent {type(message).__name__}")

    def _queue_plan(self, plan: PlanBlocks) -> None:
        if self._epoch is None:
            self._epoch = plan.pool_epoch
        is_other_open = self._planning.is_open or any(isinstance(w, PlanBlocks) for w in self._waiting)
        if plan.pool_epoch != self._epoch or is_other_open:
            raise InvariantViolated(
                f"PlanBlocks for step {plan.step_id} of epoch {plan.pool_epoch} in epoch {self._epoch}, "
                f"batch open: {is_other_open}"
            )
        self._waiting.append(plan)

    def _queue_call(self, call: RemoteCall) -> list[Said]:
        if self._epoch is None:
            self._epoch = call.pool_epoch
        if call.pool_epoch < self._epoch:
            return stale_answer(call)
        if call.pool_epoch > self._epoch:
            raise InvariantViolated(
                f"{type(call).__name__} of epoch {call.pool_epoch} in epoch {self._epoch}"
            )
        self._waiting.append(call)
        return []

    def _begin_next(self, message: PlanBlocks | RemoteCall) -> list[Said]:
        if not isinstance(message, PlanBlocks):
            self._planning.is_swa_use_known = False
            return self._remote.call(message)
        outcome = self._planning.plan(message)
        if isinstance(outcome, BlocksPlanned):
            return self._planned(outcome)
        return [("swa_cache_manager", outcome)]

    def _planned(self, answer: BlocksPlanned) -> list[Said]:
        """A batch is done. Its filled blocks are whole only now, sliding layers included."""
        said: list[Said] = [("scheduler", answer)]
        filled = self.fa.filled.take()
        if filled:
            message = BlocksFilled(pool_epoch=answer.pool_epoch, blocks=filled)
            said.append(("remote_cache_loader", message))
        return said

    def _reset_pools(self, message: ResetPools) -> list[Said]:
        stale = [self._remote.open_call, *self._waiting]
        self._epoch = message.pool_epoch
        self._begin()
        said: list[Said] = [("swa_cache_manager", message)] if self.config.has_swa else []
        for call in stale:
            if call is not None and not isinstance(call, PlanBlocks):
                said.extend(stale_answer(call))
        return said

    # Checks

    def check(self) -> None:
        """Everything that holds inside this actor, O(pool)."""
        self.fa.check()
        if not self.is_batch_open and (self.fa.evicted or not self.fa.filled.is_empty):
            raise InvariantViolated(
                f"nobody was told: {self.fa.evicted} evicted, {self.fa.filled.snapshot()} filled"
            )

    def check_touched(self) -> None:
        """After a message: pool sums, and the requests that the last PlanBlocks named, O(their blocks)."""
        touched = self._planning.touched
        self.fa.check([request_id for request_id in touched if request_id in self.fa.requests])

    def snapshot(self) -> AllocatorSnapshot:
        """The whole state between two activations, also in the middle of a batch or call. O(pool)."""
        return {
            "epoch": self._epoch,
            "fa": self.fa.snapshot(),
            "planning": self._planning.snapshot(),
            "remote": self._remote.snapshot(),
            "waiting": list(self._waiting),
            "totals": msgspec.structs.replace(self.totals),
        }

    def restore(self, snapshot: AllocatorSnapshot) -> None:
        """Go on from a snapshot of an allocator with the same configuration. Raises InvariantViolated for
        one that none could have given; then this one must not be used."""
        self._epoch = snapshot["epoch"]
        self.totals = msgspec.structs.replace(snapshot["totals"])
        self._begin()
        self.fa.restore(snapshot["fa"])
        self._planning.restore(snapshot["planning"])
        self._remote.restore(snapshot["remote"])
        self._waiting = deque(snapshot["waiting"])
