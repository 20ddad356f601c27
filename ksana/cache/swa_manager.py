"""The SWA cache manager: answers the block allocator's one batch per step, and its calls in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

from ksana.cache.cache_config import CacheConfig
from ksana.cache.swa_cache import SwaCache, SwaCacheSnapshot
from ksana.cache.swa_loading import SwaLoading, SwaLoadingSnapshot
from ksana.cache.swa_tables import SwaTables, TableSnapshot, edits_of
from ksana.errors import InvariantViolated
from ksana.messages.base import Message, PoolEpoch, RequestId
from ksana.messages.blocks import ResetPools, TableEdits
from ksana.messages.swa import (
    SwaBatch,
    SwaBatchDone,
    SwaRelease,
)
from ksana.messages.swa_remote import (
    SwaAnswer,
    SwaCall,
    SwaConfirm,
    SwaConfirmed,
    SwaDrop,
    SwaHold,
    SwaProbe,
    SwaReleaseConfirmed,
    SwaReleaseHeld,
    SwaReserve,
)

UNKNOWN_BUDGET = 1 << 40
"""No step was planned yet: a chunk may be as large as the prompt."""

Said = tuple[Literal["block_allocator"], Message]


class ManagerSnapshot(TypedDict):
    """An SWACacheManager as plain values that msgspec can write and read."""

    epoch: PoolEpoch | None
    step_budget: int
    cache: SwaCacheSnapshot
    loading: SwaLoadingSnapshot
    requests: list[TableSnapshot]


class SWACacheManager:
    """Core of the SWA cache manager.

    Receives  SwaBatch, ResetPools and what `ksana.messages.swa_remote` has from the block allocator.
    Sends     to the block allocator: one SwaBatchDone for each SwaBatch, one answer for each question.
    Owns      the SWA pool, the SWA entries, the SWA block tables, loads and holds of SWA blocks.
    Never     evicts while the idle pool has blocks, or for a demand that it refuses.
    If it fails  it has raised InvariantViolated: a bug, here or in the block allocator.
    """

    def __init__(self, config: CacheConfig) -> None:
        if not config.has_swa:
            raise ValueError("this model has no sliding layers")
        self.config = config
        self.cache = SwaCache(config)
        self.loading = SwaLoading(config, self.cache)
        self.tables = SwaTables(config, self.cache, self.loading)
        self._step_budget = UNKNOWN_BUDGET
        """The largest step so far: what a chunk of a prefill may take."""
        self._epoch: PoolEpoch | None = None
        self._touched: list[RequestId] = []

    def next_timer_s(self) -> float | None:
        return None

    def handle(self, now_s: float, messages: Sequence[Message]) -> list[Said]:  # noqa: ARG002
        said: list[Said] = []
        for message in messages:
            if isinstance(message, SwaBatch):
                said.append(("block_allocator", self._batch(message)))
            elif isinstance(message, ResetPools):
                self._reset(message.pool_epoch)
            elif isinstance(message, SwaCall):
                said.extend(("block_allocator", answer) for answer in self._call(message))
            else:
                raise InvariantViolated(f"the SWA cache manager was sent {type(message).__name__}")
            self.cache.check_sums()
        return said

    def _reset(self, epoch: PoolEpoch) -> None:
        num_evictions = self.cache.num_evictions
        self.cache = SwaCache(self.config)
        self.cache.num_evictions = num_evictions
        self.loading = SwaLoading(self.config, self.cache)
        self.tables = SwaTables(self.config, self.cache, self.loading)
        self._touched = []
        self._epoch = epoch

    def _check_epoch(self, message: SwaBatch | SwaCall) -> None:
        if self._epoch is None:
            self._epoch = message.pool_epoch
        if message.pool_epoch != self._epoch:
            raise InvariantViolated(
                f"{type(message).__name__} of epoch {message.pool_epoch} in epoch {self._epoch}"
            )

    # Remote loading and writing back

    def _call(self, call: SwaCall) -> list[SwaAnswer]:
        self._check_epoch(call)
        self._touched = []
        loading = self.loading
        if isinstance(call, SwaProbe):
            return [loading.probe(call, self.tables.room, self._step_budget)]
        if isinstance(call, SwaReserve):
            return [loading.reserve(call, self.tables.room)]
        if isinstance(call, SwaConfirm):
            return [self._confirm(call)]
        if isinstance(call, SwaHold):
            return [loading.hold(call)]
        if isinstance(call, SwaDrop):
            loading.drop(call.request_id)
        elif isinstance(call, SwaReleaseConfirmed):
            self.tables.release(SwaRelease(request_id=call.request_id, last_step_id=0))
        elif isinstance(call, SwaReleaseHeld):
            loading.release_held(call.hold_id)
        else:
            for fa_block in call.evicted:
                self.cache.forget(fa_block)
        return []

    def _confirm(self, call: SwaConfirm) -> SwaConfirmed:
        request, answer = self.loading.confirm(call, self._step_budget)
        self.tables.adopt(call.request_id, request)
        self._touched = [call.request_id]
        return answer

    # The batch of a step

    def _batch(self, batch: SwaBatch) -> SwaBatchDone:
        self._check_epoch(batch)
        if batch.token_budget > self._step_budget or self._step_budget == UNKNOWN_BUDGET:
            self._step_budget = batch.token_budget
        self._touched = [u.request_id for u in batch.updates] + [d.request_id for d in batch.demands]
        self.cache.step_done(batch.done_step_id)
        edits: dict[RequestId, dict[int, int]] = {}
        fixed: list[int] = []
        for update in batch.updates:
            fixed += self.tables.update(update, edits.setdefault(update.request_id, {}))
        for release in batch.releases:
            self.tables.release(release)
            edits.pop(release.request_id, None)
        for fa_block in batch.evicted:
            self.cache.forget(fa_block)
        grants, refusals = self.tables.take_all(batch.demands, batch.token_budget)
        return SwaBatchDone(
            pool_epoch=batch.pool_epoch,
            step_id=batch.step_id,
            grants=tuple(grants),
            refusals=tuple(refusals),
            edits=tuple(
                TableEdits(request_id=request_id, swa_edits=edits_of(changes.items()))
                for request_id, changes in edits.items()
                if changes
            ),
            swa_use=self.cache.pool.use(),
            num_evictions=self.cache.num_evictions,
            fixed=tuple(fixed) if self.config.write_back else (),
        )

    # Checks

    def check_touched(self) -> None:
        """After a message: pool sums, and the requests that the last batch named, O(their blocks)."""
        self.cache.check_sums()
        self.tables.check_owned(self._touched)

    def check(self) -> None:
        """Everything that holds inside this actor, O(pool)."""
        self.cache.check()
        self.loading.check()
        requests = self.tables.requests
        if not self.loading.loads.keys().isdisjoint(requests):
            raise InvariantViolated(f"loading and with a table: {self.loading.loads.keys() & requests}")
        self.tables.check()

    def snapshot(self) -> ManagerSnapshot:
        """The whole state between two activations. O(pool)."""
        return {
            "epoch": self._epoch,
            "step_budget": self._step_budget,
            "cache": self.cache.snapshot(),
            "loading": self.loading.snapshot(),
            "requests": self.tables.snapshot(),
        }

    def restore(self, snapshot: ManagerSnapshot) -> None:
        """Go on from a snapshot of a manager with the same configuration. Raises InvariantViolated for one
        that none could have given; then this one must not be used."""
        self._epoch, self._step_budget = snapshot["epoch"], snapshot["step_budget"]
        self.cache.restore(snapshot["cache"])
        self.loading.restore(snapshot["loading"])
        self.tables.restore(snapshot["requests"])
        self._touched = []
        self.check()
