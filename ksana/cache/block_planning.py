"""One PlanBlocks of the scheduler: its FA part, the question to the SWA cache manager, and the answer."""

from __future__ import annotations

from typing import TypedDict

import msgspec

from ksana.cache.cache_config import CacheConfig, ceil_div
from ksana.cache.fa_cache import FaCache, Reason, Taken
from ksana.errors import InvariantViolated
from ksana.messages.base import RequestId, StepId
from ksana.messages.blocks import (
    AllocateRequestBlocks,
    BlocksGranted,
    BlocksPlanned,
    BlocksRefused,
    BlockTableEdit,
    PlanBlocks,
    PoolUse,
    TableEdits,
)
from ksana.messages.swa import (
    SwaBatch,
    SwaBatchDone,
    SwaDemand,
    SwaFilled,
    SwaGranted,
    SwaRelease,
    SwaUpdate,
)


class _OpenBatch(msgspec.Struct):
    """A PlanBlocks whose answer is being made. `outcomes` has one entry per demand, in order."""

    plan: PlanBlocks
    outcomes: list[Taken | Reason]
    fa_edits: dict[RequestId, list[BlockTableEdit]]
    refused_updates: list[RequestId] = []
    """Of requests that are loading."""


class TakenSnapshot(msgspec.Struct, frozen=True):
    """A `Taken`, less what its demand and the requests say."""

    is_new: bool
    start: int
    num_tokens: int
    first_index: int
    num_before: int


class OpenBatchSnapshot(msgspec.Struct, frozen=True):
    """An open batch."""

    plan: PlanBlocks
    outcomes: list[TakenSnapshot | Reason]
    fa_edits: dict[RequestId, list[BlockTableEdit]]
    refused_updates: list[RequestId]


class PlanningSnapshot(TypedDict):
    """A BlockPlanning as plain values, but for the FaCache."""

    swa_use: PoolUse
    is_swa_use_known: bool
    open: OpenBatchSnapshot | None


class BlockPlanning:
    """Turns a PlanBlocks into a SwaBatch, or at once into its answer. At most one is open."""

    def __init__(self, config: CacheConfig, fa: FaCache) -> None:
        self.config = config
        self.fa = fa
        self.swa_use = empty_pool(config.num_swa_blocks)
        """As the SWA cache manager last said."""
        self.is_swa_use_known = True
        """Whether that still holds."""
        self.touched: list[RequestId] = []
        """The requests that the last PlanBlocks named."""
        self._open: _OpenBatch | None = None

    @property
    def is_open(self) -> bool:
        """Whether a PlanBlocks waits for the SWA cache manager."""
        return self._open is not None

    def plan(self, plan: PlanBlocks) -> SwaBatch | BlocksPlanned:
        """Do the FA part. None is open."""
        self.touched = [u.request_id for u in plan.updates] + [d.request_id for d in plan.demands]
        self.fa.step_done(plan.done_step_id)
        batch = _OpenBatch(plan, [], {})
        updates = self._update_all(batch)
        releases = self._release_all(batch)
        self._take_all(batch)
        if self.config.has_swa:
            message = self._swa_batch(batch, updates, releases)
            if message is not None:
                self._open = batch
                return message
        return self._answer(batch, None)

    def swa_batch_done(self, done: SwaBatchDone) -> BlocksPlanned:
        """The SWA cache manager has answered."""
        batch, self._open = self._open, None
        if batch is None or done.step_id != batch.plan.step_id:
            raise InvariantViolated(f"an SWA answer for step {done.step_id}, which was not asked")
        self.swa_use = done.swa_use
        self.is_swa_use_known = True
        self.fa.totals.num_swa_evictions = done.num_evictions
        self.fa.filled.drop_unfixed(done.fixed)
        return self._answer(batch, done)

    def _update_all(self, batch: _OpenBatch) -> list[SwaUpdate]:
        swa_updates = []
        for update in batch.plan.updates:
            if update.request_id in self.fa.loads:
                batch.refused_updates.append(update.request_id)
                continue
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
            outcome = self._take(demand, budget, is_refused)
            if isinstance(outcome, Taken):
                budget -= outcome.num_tokens
            elif outcome != "loading":
                is_refused = True
            batch.outcomes.append(outcome)

    def _take(self, demand: AllocateRequestBlocks, budget: int, is_refused: bool) -> Taken | Reason:
        if demand.request_id in self.fa.loads:
            return "loading"
        if demand.new is None:
            return self.fa.take_for_running(demand, budget)
        if is_refused:
            return "behind"
        if demand.request_id in self.fa.requests:
            return self.fa.take_for_confirmed(demand, demand.new, budget)
        return self.fa.take_for_new(demand, demand.new, budget)

    # The SWA hop

    def _swa_batch(
        self, batch: _OpenBatch, updates: list[SwaUpdate], releases: list[SwaRelease]
    ) -> SwaBatch | None:
        """What the SWA cache manager must hear, or None when that is nothing."""
        evicted = self.fa.take_evicted()
        taken = [outcome for outcome in batch.outcomes if isinstance(outcome, Taken)]
        has_new = any(outcome.is_new for outcome in taken)
        demands = [demand for outcome in taken if (demand := self._swa_demand(outcome, has_new))]
        if not (
            updates
            or releases
            or evicted
            or demands
            or self.swa_use.num_deferred
            or not self.is_swa_use_known
        ):
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
            fa_blocks=self.fa.fa_blocks(request.fa_block_ids[first_index:end_index]),
            num_matched=request.num_matched if taken.is_new and not request.is_confirmed else 0,
            count_hits=taken.demand.new is not None and not taken.demand.new.resumed,
        )

    # The answer

    def _answer(self, batch: _OpenBatch, swa: SwaBatchDone | None) -> BlocksPlanned:
        swa_grants = {grant.request_id: grant for grant in swa.grants} if swa is not None else {}
        swa_refusals = {refusal.request_id: refusal for refusal in swa.refusals} if swa is not None else {}
        step_id = batch.plan.step_id
        grants: list[BlocksGranted] = []
        refusals = [
            BlocksRefused(request_id=request_id, reason="loading") for request_id in batch.refused_updates
        ]
        for demand, outcome in zip(batch.plan.demands, batch.outcomes, strict=True):
            request_id = demand.request_id
            if not isinstance(outcome, Taken):
                refusals.append(BlocksRefused(request_id=request_id, reason=outcome))
            elif request_id in swa_refusals:
                self.fa.undo(outcome)
                refusals.append(BlocksRefused(request_id=request_id, reason=swa_refusals[request_id].reason))
            else:
                grants.append(self._grant(outcome, swa_grants.get(request_id), step_id))
        return BlocksPlanned(
            pool_epoch=batch.plan.pool_epoch,
            step_id=step_id,
            grants=tuple(grants),
            refusals=tuple(refusals),
            edits=_joined_edits(batch.fa_edits, swa.edits if swa is not None else ()),
            copies=(),
            fa_use=self.fa.pool.use(),
            swa_use=self.swa_use if self.config.has_swa else None,
            counters=self.fa.totals.as_message(),
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
        first_index, table = taken.first_index, request.fa_block_ids
        return BlocksGranted(
            request_id=request.request_id,
            start=start,
            num_tokens=num_tokens,
            fa_write_start=max(start, request.num_matched * self.config.block_size),
            fa_edits=_places(table[first_index:], first_index) if len(table) > first_index else (),
            swa_edits=swa.edits if swa is not None else (),
        )

    # Snapshots

    def snapshot(self) -> PlanningSnapshot:
        """What the FaCache does not have, as plain values."""
        batch = self._open
        return {
            "swa_use": self.swa_use,
            "is_swa_use_known": self.is_swa_use_known,
            "open": None
            if batch is None
            else OpenBatchSnapshot(
                plan=batch.plan,
                outcomes=[
                    TakenSnapshot(o.is_new, o.start, o.num_tokens, o.first_index, o.num_before)
                    if isinstance(o, Taken)
                    else o
                    for o in batch.outcomes
                ],
                fa_edits={request_id: list(edits) for request_id, edits in batch.fa_edits.items()},
                refused_updates=list(batch.refused_updates),
            ),
        }

    def restore(self, snapshot: PlanningSnapshot) -> None:
        """Go on from a snapshot. The FaCache was restored before."""
        self.swa_use = snapshot["swa_use"]
        self.is_swa_use_known = snapshot["is_swa_use_known"]
        batch = snapshot["open"]
        self._open = None
        if batch is None:
            return
        demands = batch.plan.demands
        if len(batch.outcomes) != len(demands):
            raise InvariantViolated(f"{len(batch.outcomes)} outcomes of {len(demands)} demands")
        outcomes: list[Taken | Reason] = []
        for demand, outcome in zip(demands, batch.outcomes, strict=True):
            if not isinstance(outcome, TakenSnapshot):
                outcomes.append(outcome)
                continue
            request = self.fa.requests.get(demand.request_id)
            if request is None:
                raise InvariantViolated(f"blocks were taken for request {demand.request_id}, which has none")
            outcomes.append(Taken(request, demand, *msgspec.structs.astuple(outcome)))
        fa_edits = {request_id: list(edits) for request_id, edits in batch.fa_edits.items()}
        self._open = _OpenBatch(batch.plan, outcomes, fa_edits, list(batch.refused_updates))


def empty_pool(num_blocks: int) -> PoolUse:
    """The use of a pool in which nothing was ever allocated."""
    return PoolUse(num_blocks=num_blocks, num_free=num_blocks, num_cached=0, num_referenced=0, num_deferred=0)


def _places(block_ids: list[int], first_index: int) -> tuple[BlockTableEdit, ...]:
    """Edits that fill a table from `first_index` on."""
    places = enumerate(block_ids, first_index)
    return tuple([BlockTableEdit(index=index, block_id=block_id) for index, block_id in places])


def _joined_edits(
    fa_edits: dict[RequestId, list[BlockTableEdit]], swa_edits: tuple[TableEdits, ...]
) -> tuple[TableEdits, ...]:
    """One TableEdits per request: FA edits, and those of the SWA cache manager."""
    if not (fa_edits or swa_edits):
        return ()
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
