"""The block allocator: answers the scheduler's one batch per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ksana.cache.cache_config import CacheConfig, ceil_div
from ksana.cache.fa_cache import CacheTotals, FaCache, Reason, Taken
from ksana.errors import InvariantViolated
from ksana.messages.base import Message, PoolEpoch, RequestId, StepId
from ksana.messages.blocks import (
    BlocksGranted,
    BlocksPlanned,
    BlocksRefused,
    BlockTableEdit,
    PlanBlocks,
    PoolUse,
    ResetPools,
    TableEdits,
)
from ksana.messages.swa import (
    FaBlock,
    SwaBatch,
    SwaBatchDone,
    SwaDemand,
    SwaFilled,
    SwaGranted,
    SwaRelease,
    SwaUpdate,
)

Said = tuple[Literal["scheduler", "swa_cache_manager"], Message]


class _OpenBatch(msgspec.Struct):
    """A PlanBlocks whose answer is being made. `outcomes` has one entry per demand, in order."""

    plan: PlanBlocks
    outcomes: list[Taken | Reason]
    fa_edits: dict[RequestId, list[BlockTableEdit]]


class BlockAllocator:
    """Core of the block allocator.

    Receives  PlanBlocks and ResetPools from the scheduler, SwaBatchDone from the SWA cache manager.
    Sends     SwaBatch and ResetPools to the SWA cache manager (if the model has sliding layers),
              BlocksPlanned to the scheduler: one for each PlanBlocks of the current epoch.
    Owns      the FA pool, the prefix tree, the block tables.
    Never     holds two batches open; gives a block to two requests that both write it.
    If it fails  it has raised InvariantViolated: a bug, here or in the scheduler.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.totals = CacheTotals()
        self.fa = FaCache(config, self.totals)
        self._epoch: PoolEpoch | None = None
        self._open: _OpenBatch | None = None
        self._swa_use = _empty_pool(config.num_swa_blocks)
        self._touched: list[RequestId] = []

    @property
    def is_batch_open(self) -> bool:
        """Whether a PlanBlocks waits for the SWA cache manager."""
        return self._open is not None

    def next_timer_s(self) -> float | None:
        return None

    def handle(self, now_s: float, messages: Sequence[Message]) -> list[Said]:  # noqa: ARG002
        said: list[Said] = []
        for message in messages:
            if isinstance(message, PlanBlocks):
                said.append(self._plan_blocks(message))
            elif isinstance(message, SwaBatchDone):
                said.extend(self._swa_batch_done(message))
            elif isinstance(message, ResetPools):
                said.extend(self._reset_pools(message))
            else:
                raise InvariantViolated(f"the block allocator was sent {type(message).__name__}")
            self.fa.pool.check_sums()
        return said

    def _reset_pools(self, message: ResetPools) -> list[Said]:
        self._epoch = message.pool_epoch
        self.fa = FaCache(self.config, self.totals)
        self._open = None
        self._touched = []
        self._swa_use = _empty_pool(self.config.num_swa_blocks)
        return [("swa_cache_manager", message)] if self.config.has_swa else []

    # PlanBlocks

    def _plan_blocks(self, plan: PlanBlocks) -> Said:
        if self._epoch is None:
            self._epoch = plan.pool_epoch
        if plan.pool_epoch != self._epoch or self._open is not None:
            raise InvariantViolated(
                f"PlanBlocks for step {plan.step_id} of epoch {plan.pool_epoch} in epoch {self._epoch}, "
                f"batch open: {self._open is not None}"
            )
        self._touched = [u.request_id for u in plan.updates] + [d.request_id for d in plan.demands]
        self.fa.step_done(plan.done_step_id)
        batch = _OpenBatch(plan, [], {})
        updates = self._update_all(batch)
        releases = self._release_all(batch)
        self._take_all(batch)
        if self.config.has_swa:
            message = self._swa_batch(batch, updates, releases)
            if message is not None:
                self._open = batch
                return ("swa_cache_manager", message)
        return ("scheduler", self._answer(batch, None))

    def _update_all(self, batch: _OpenBatch) -> list[SwaUpdate]:
        swa_updates = []
        for update in batch.plan.updates:
            request, full, edits = self.fa.update_request_tokens(update)
            if edits:
                batch.fa_edits.setdefault(request.request_id, []).extend(edits)
            if not self.config.has_swa:
                continue
            first_index = self.config.first_window_block(request.num_computed)
            if not self.config.enable_prefix_caching:
                full = range(0)
            if not full and first_index == request.swa_first:
                continue
            request.swa_first = first_index
            table, generation = request.fa_block_ids, self.fa.pool.generation
            swa_updates.append(
                SwaUpdate(
                    request_id=request.request_id,
                    first_index=first_index,
                    filled=tuple(
                        SwaFilled(index=i, fa_block_id=table[i], generation=generation(table[i]))
                        for i in full
                    ),
                    last_step_id=request.last_step_id,
                )
            )
        return swa_updates

    def _release_all(self, batch: _OpenBatch) -> list[SwaRelease]:
        swa_releases = []
        for release in batch.plan.releases:
            request = self.fa.release_request(release.request_id)
            batch.fa_edits.pop(release.request_id, None)
            swa_releases.append(SwaRelease(request_id=request.request_id, last_step_id=request.last_step_id))
        return swa_releases

    def _take_all(self, batch: _OpenBatch) -> None:
        """The FA part of every demand, in order. A new demand behind a refused one is refused."""
        budget = batch.plan.token_budget
        is_refused = False
        for demand in batch.plan.demands:
            outcome: Taken | Reason
            if demand.new is None:
                outcome = self.fa.take_for_running(demand, budget)
            elif is_refused:
                outcome = "behind"
            else:
                outcome = self.fa.take_for_new(demand, demand.new, budget)
            if isinstance(outcome, Taken):
                budget -= outcome.num_tokens
            else:
                is_refused = True
            batch.outcomes.append(outcome)

    # The SWA hop

    def _swa_batch(
        self, batch: _OpenBatch, updates: list[SwaUpdate], releases: list[SwaRelease]
    ) -> SwaBatch | None:
        """What the SWA cache manager must hear, or None when that is nothing."""
        evicted = self.fa.take_evicted()
        taken = [outcome for outcome in batch.outcomes if isinstance(outcome, Taken)]
        has_new = any(outcome.is_new for outcome in taken)
        demands = [demand for outcome in taken if (demand := self._swa_demand(outcome, has_new))]
        if not (updates or releases or evicted or demands or self._swa_use.num_deferred):
            return None
        plan = batch.plan
        return SwaBatch(
            pool_epoch=plan.pool_epoch,
            step_id=plan.step_id,
            done_step_id=plan.done_step_id,
            token_budget=plan.token_budget,
            updates=tuple(updates),
            releases=tuple(releases),
            evicted=evicted,
            demands=tuple(demands),
        )

    def _swa_demand(self, taken: Taken, has_new: bool) -> SwaDemand | None:
        """The SWA part of a demand; None for a running request that needs no SWA block, as long as its
        tokens compete with no new request for the budget."""
        request, end = taken.request, taken.start + taken.num_tokens
        first_index = request.swa_end
        end_index = ceil_div(end, self.config.block_size)
        if not taken.is_new and not has_new and end_index <= first_index:
            return None
        is_prefill = request.num_reserved_tokens > request.num_planned or taken.is_new
        return SwaDemand(
            request_id=request.request_id,
            is_new=taken.is_new,
            start=taken.start,
            num_tokens=taken.demand.num_tokens,
            num_total_tokens=request.num_tokens,
            max_end=end,
            num_reserved_tokens=request.num_reserved_tokens if is_prefill else 0,
            first_index=first_index,
            fa_blocks=tuple(
                FaBlock(fa_block_id=b, generation=self.fa.pool.generation(b))
                for b in request.fa_block_ids[first_index:end_index]
            ),
            num_matched=request.num_matched if taken.is_new else 0,
            count_hits=taken.demand.new is not None and not taken.demand.new.resumed,
        )

    def _swa_batch_done(self, done: SwaBatchDone) -> list[Said]:
        if done.pool_epoch != self._epoch:
            return []  # the pools were reset after the question
        batch = self._open
        if batch is None or done.step_id != batch.plan.step_id:
            raise InvariantViolated(f"an SWA answer for step {done.step_id}, which was not asked")
        self._open = None
        self._swa_use = done.swa_use
        self.totals.num_swa_evictions = done.num_evictions
        return [("scheduler", self._answer(batch, done))]

    # The answer

    def _answer(self, batch: _OpenBatch, swa: SwaBatchDone | None) -> BlocksPlanned:
        swa_grants = {grant.request_id: grant for grant in swa.grants} if swa is not None else {}
        swa_refusals = {refusal.request_id: refusal for refusal in swa.refusals} if swa is not None else {}
        grants: list[BlocksGranted] = []
        refusals: list[BlocksRefused] = []
        for demand, outcome in zip(batch.plan.demands, batch.outcomes, strict=True):
            refusal = swa_refusals.get(demand.request_id)
            if isinstance(outcome, Taken) and refusal is not None:
                self.fa.undo(outcome)
                outcome = refusal.reason
            if isinstance(outcome, Taken):
                swa_grant = swa_grants.get(demand.request_id)
                grants.append(self._grant(outcome, swa_grant, batch.plan.step_id))
            else:
                refusals.append(BlocksRefused(request_id=demand.request_id, reason=outcome))
        return BlocksPlanned(
            pool_epoch=batch.plan.pool_epoch,
            step_id=batch.plan.step_id,
            grants=tuple(grants),
            refusals=tuple(refusals),
            edits=_joined_edits(batch.fa_edits, swa.edits if swa is not None else ()),
            copies=(),
            fa_use=self.fa.pool.use(),
            swa_use=self._swa_use if self.config.has_swa else None,
            counters=self.totals.as_message(),
        )

    def _grant(self, taken: Taken, swa: SwaGranted | None, step_id: StepId) -> BlocksGranted:
        request = taken.request
        start, num_tokens = taken.start, taken.num_tokens
        if swa is not None:
            start, num_tokens = swa.start, swa.num_tokens
        self.fa.settle(taken, start, num_tokens, step_id)
        if self.config.has_swa:
            request.swa_end = max(request.swa_end, ceil_div(start + num_tokens, self.config.block_size))
            if taken.is_new:
                request.swa_first = self.config.first_window_block(start)
        return BlocksGranted(
            request_id=request.request_id,
            start=start,
            num_tokens=num_tokens,
            fa_write_start=max(start, request.num_matched * self.config.block_size),
            fa_edits=tuple(
                BlockTableEdit(index=index, block_id=request.fa_block_ids[index])
                for index in range(taken.first_index, len(request.fa_block_ids))
            ),
            swa_edits=swa.edits if swa is not None else (),
        )

    # Checks

    def check(self) -> None:
        """Everything that holds inside this actor, O(pool)."""
        self.fa.check()

    def check_touched(self) -> None:
        """After a message: pool sums, and the requests that the last PlanBlocks named, O(their blocks)."""
        self.fa.check([request_id for request_id in self._touched if request_id in self.fa.requests])

    def snapshot(self) -> dict[str, Any]:
        """The whole state as plain values. Only between batches."""
        return {
            "epoch": self._epoch,
            "fa": self.fa.snapshot(),
            "swa_use": msgspec.to_builtins(self._swa_use),
            "totals": msgspec.to_builtins(self.totals),
        }


def _empty_pool(num_blocks: int) -> PoolUse:
    return PoolUse(num_blocks=num_blocks, num_free=num_blocks, num_cached=0, num_referenced=0, num_deferred=0)


def _joined_edits(
    fa_edits: dict[RequestId, list[BlockTableEdit]], swa_edits: tuple[TableEdits, ...]
) -> tuple[TableEdits, ...]:
    """One TableEdits per request: FA edits, and those of the SWA cache manager."""
    by_request = {edits.request_id: edits.swa_edits for edits in swa_edits}
    request_ids = dict.fromkeys([*fa_edits, *by_request])
    return tuple(
        TableEdits(
            request_id=request_id,
            fa_edits=tuple(fa_edits.get(request_id, ())),
            swa_edits=by_request.get(request_id, ()),
        )
        for request_id in request_ids
    )
