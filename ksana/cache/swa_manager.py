"""The SWA cache manager: answers the block allocator's one batch per step, and its calls in between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypedDict

from ksana.cache.cache_config import CacheConfig, ceil_div
from ksana.cache.swa_cache import SwaCache, SwaCacheSnapshot
from ksana.cache.swa_entry import SwaEntry
from ksana.cache.swa_loading import SwaLoading, SwaLoadingSnapshot, SwaRequest
from ksana.cache.window_match import last_valid_end, registered_blocks
from ksana.errors import InvariantViolated
from ksana.messages.base import Message, PoolEpoch, RequestId
from ksana.messages.blocks import NO_BLOCK, BlockTableEdit, ResetPools, TableEdits
from ksana.messages.swa import (
    SwaBatch,
    SwaBatchDone,
    SwaDemand,
    SwaGranted,
    SwaRefused,
    SwaRelease,
    SwaUpdate,
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
    """An SWACacheManager as plain values that msgspec can write and read. A request: its id, first_index,
    num_reserved, is_confirmed, SWA blocks."""

    epoch: PoolEpoch | None
    step_budget: int
    cache: SwaCacheSnapshot
    loading: SwaLoadingSnapshot
    requests: list[tuple[RequestId, int, int, bool, list[int]]]


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
        self.requests: dict[RequestId, SwaRequest] = {}
        self.num_set_aside = 0
        """Blocks that admission promised to these requests and that they have not taken yet."""
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
        self.requests = {}
        self.num_set_aside = 0
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
            return [loading.probe(call, self._room, self._step_budget)]
        if isinstance(call, SwaReserve):
            return [loading.reserve(call, self._room)]
        if isinstance(call, SwaConfirm):
            return [self._confirm(call)]
        if isinstance(call, SwaHold):
            return [loading.hold(call)]
        if isinstance(call, SwaDrop):
            loading.drop(call.request_id)
        elif isinstance(call, SwaReleaseConfirmed):
            self._release(SwaRelease(request_id=call.request_id, last_step_id=0))
        elif isinstance(call, SwaReleaseHeld):
            loading.release_held(call.hold_id)
        else:
            for fa_block in call.evicted:
                self.cache.forget(fa_block)
        return []

    @property
    def _room(self) -> int:
        """Blocks that can be had and were promised to nobody."""
        return self.cache.room - self.num_set_aside - self.loading.num_set_aside

    def _confirm(self, call: SwaConfirm) -> SwaConfirmed:
        request, answer = self.loading.confirm(call, self._step_budget)
        self.requests[call.request_id] = request
        self.num_set_aside += request.num_set_aside
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
            fixed += self._update(update, edits.setdefault(update.request_id, {}))
        for release in batch.releases:
            self._release(release)
            edits.pop(release.request_id, None)
        for fa_block in batch.evicted:
            self.cache.forget(fa_block)
        grants, refusals = self._take_all(batch)
        return SwaBatchDone(
            pool_epoch=batch.pool_epoch,
            step_id=batch.step_id,
            grants=tuple(grants),
            refusals=tuple(refusals),
            edits=tuple(
                TableEdits(request_id=request_id, swa_edits=_edits(changes.items()))
                for request_id, changes in edits.items()
                if changes
            ),
            swa_use=self.cache.pool.use(),
            num_evictions=self.cache.num_evictions,
            fixed=tuple(fixed) if self.config.write_back else (),
        )

    def _update(self, update: SwaUpdate, changes: dict[int, int]) -> list[int]:
        """Filled blocks become fixed, then blocks outside the window lose the request's reference.

        Returns the FA blocks that had no SWA block before.
        """
        request = self._running(update.request_id)
        fixed: list[int] = []
        for filled in update.filled:
            offset = filled.index - request.first_index
            own = request.entries[offset]
            entry = self.cache.fix(own, filled, update.last_step_id)
            if entry is not own:
                request.entries[offset] = entry
                changes[filled.index] = entry.swa_block_id
            else:
                fixed.append(entry.fa_block_id)
        num_left = update.first_index - request.first_index
        if not 0 <= num_left <= len(request.entries):
            raise InvariantViolated(f"{update} does not fit {request.first_index} to {request.end_index}")
        if num_left:
            self.num_set_aside -= request.num_set_aside
            # Steps in flight start behind the computed tokens, so none of them reads these blocks.
            self.cache.release(request.entries[:num_left], 0)
            del request.entries[:num_left]
            changes.update((index, NO_BLOCK) for index in range(request.first_index, update.first_index))
            request.first_index = update.first_index
            self.num_set_aside += request.num_set_aside
        return fixed

    def _release(self, release: SwaRelease) -> None:
        request = self._running(release.request_id)
        del self.requests[release.request_id]
        self.num_set_aside -= request.num_set_aside
        self.cache.release(request.entries, release.last_step_id)

    def _running(self, request_id: RequestId) -> SwaRequest:
        request = self.requests.get(request_id)
        if request is None:
            raise InvariantViolated(f"request {request_id} has no SWA blocks, but is spoken of as running")
        return request

    # Demands

    def _take_all(self, batch: SwaBatch) -> tuple[list[SwaGranted], list[SwaRefused]]:
        grants: list[SwaGranted] = []
        refusals: list[SwaRefused] = []
        budget = batch.token_budget
        for demand in batch.demands:
            outcome: SwaGranted | SwaRefused
            if not demand.is_new:
                outcome = self._take_for_running(demand, budget)
            elif refusals:
                outcome = SwaRefused(request_id=demand.request_id, reason="behind")
            elif demand.request_id in self.requests:
                outcome = self._take_for_confirmed(demand, budget)
            else:
                outcome = self._take_for_new(demand, budget, batch.token_budget)
            if isinstance(outcome, SwaGranted):
                budget -= outcome.num_tokens
                grants.append(outcome)
            else:
                refusals.append(outcome)
        return grants, refusals

    def _take_for_running(self, demand: SwaDemand, budget: int) -> SwaGranted | SwaRefused:
        request = self._running(demand.request_id)
        if demand.first_index != request.end_index:
            raise InvariantViolated(f"{demand} does not go on at block {request.end_index}")
        num_tokens = min(demand.num_tokens, budget, demand.max_end - demand.start)
        if num_tokens < 1:
            return SwaRefused(request_id=demand.request_id, reason="budget")
        end_index = ceil_div(demand.start + num_tokens, self.config.block_size)
        num_fresh = max(0, end_index - request.end_index)
        if num_fresh > self.cache.room:
            return SwaRefused(request_id=demand.request_id, reason="no_room")
        first_index = request.end_index
        entries = self.cache.allocate(first_index, demand.fa_blocks[:num_fresh])
        self.num_set_aside -= request.num_set_aside
        request.entries.extend(entries)
        if not demand.num_reserved_tokens:
            request.num_reserved = 0
        self.num_set_aside += request.num_set_aside
        return self._granted(demand, demand.start, num_tokens, first_index, entries)

    def _take_for_new(self, demand: SwaDemand, budget: int, step_budget: int) -> SwaGranted | SwaRefused:
        """Both phases of the match, and blocks for the tokens behind the endpoint."""
        config, cache = self.config, self.cache
        matched = demand.fa_blocks[: demand.num_matched]
        endpoint = last_valid_end(
            cache.valid(matched),
            config.window_blocks,
            window_open_at_start=config.window_open_at_start,
        )
        start = endpoint * config.block_size
        num_left = demand.num_total_tokens - start
        num_tokens = min(demand.num_tokens, num_left, budget, demand.max_end - start)
        if num_tokens < 1:
            return SwaRefused(request_id=demand.request_id, reason="budget")
        window = registered_blocks(endpoint, config.window_blocks)
        end_index = ceil_div(start + num_tokens, config.block_size)
        num_fresh = end_index - endpoint
        if len(window) + num_fresh > cache.pool.num_blocks:
            return SwaRefused(request_id=demand.request_id, reason="never")
        reserved_end = max(end_index, ceil_div(demand.num_reserved_tokens, config.block_size))
        num_peak = config.num_swa_peak(reserved_end - window.start, min(step_budget, num_left))
        num_pinned = sum(cache.is_reclaimable(matched[index].fa_block_id) for index in window)
        room = self._room - num_pinned
        if max(num_fresh, num_peak - len(window)) > room:
            return SwaRefused(request_id=demand.request_id, reason="no_room")

        entries = []
        for index in window:
            fa_block_id = matched[index].fa_block_id
            entries.append(cache.set_reclaimable(fa_block_id, False))
            if demand.count_hits:
                cache.increment_hit_count(fa_block_id)
        entries.extend(cache.allocate(endpoint, demand.fa_blocks[endpoint:end_index]))
        request = SwaRequest(window.start, entries, num_peak)
        self.requests[demand.request_id] = request
        self.num_set_aside += request.num_set_aside
        return self._granted(demand, start, num_tokens, window.start, entries)

    def _take_for_confirmed(self, demand: SwaDemand, budget: int) -> SwaGranted | SwaRefused:
        """The first tokens behind the endpoint that a remote load has led to. Now its blocks count a hit:
        once, and not at all if the request gave them back before it ran."""
        request, cache = self._running(demand.request_id), self.cache
        endpoint = request.end_index
        if not request.is_confirmed or demand.first_index != endpoint:
            raise InvariantViolated(f"{demand} is not new, or does not go on at block {endpoint}")
        start = endpoint * self.config.block_size
        num_left = demand.num_total_tokens - start
        num_tokens = min(demand.num_tokens, num_left, budget, demand.max_end - start)
        if num_tokens < 1:
            return SwaRefused(request_id=demand.request_id, reason="budget")
        num_fresh = ceil_div(start + num_tokens, self.config.block_size) - endpoint
        if num_fresh > min(cache.room, request.num_set_aside + max(0, self._room)):
            return SwaRefused(request_id=demand.request_id, reason="no_room")
        if demand.count_hits:
            for entry in request.entries:
                cache.increment_hit_count(entry.fa_block_id)
        self.num_set_aside -= request.num_set_aside
        request.is_confirmed = False
        request.entries.extend(cache.allocate(endpoint, demand.fa_blocks[:num_fresh]))
        self.num_set_aside += request.num_set_aside
        return self._granted(demand, start, num_tokens, request.first_index, request.entries)

    def _granted(
        self, demand: SwaDemand, start: int, num_tokens: int, first_index: int, entries: list[SwaEntry]
    ) -> SwaGranted:
        places = enumerate((entry.swa_block_id for entry in entries), first_index)
        return SwaGranted(
            request_id=demand.request_id, start=start, num_tokens=num_tokens, edits=_edits(places)
        )

    # Checks

    def check_touched(self) -> None:
        """After a message: pool sums, and the requests that the last batch named, O(their blocks)."""
        self.cache.check_sums()
        for request_id in self._touched:
            request = self.requests.get(request_id)
            for entry in request.entries if request is not None else ():
                if not self.cache.pool.owner_count(entry.swa_block_id):
                    raise InvariantViolated(f"request {request_id} reads a block nobody owns: {entry}")

    def check(self) -> None:
        """Everything that holds inside this actor, O(pool)."""
        self.cache.check()
        self.loading.check()
        if not self.loading.loads.keys().isdisjoint(self.requests):
            raise InvariantViolated(f"loading and with a table: {self.loading.loads.keys() & self.requests}")
        set_aside = 0
        owners: dict[int, int] = {}
        for request in self.requests.values():
            set_aside += request.num_set_aside
            for entry in request.entries:
                owners[entry.swa_block_id] = owners.get(entry.swa_block_id, 0) + 1
        if set_aside != self.num_set_aside:
            raise InvariantViolated(f"{set_aside} SWA blocks are set aside, not {self.num_set_aside}")
        for swa_block_id in range(self.cache.pool.num_blocks):
            if self.cache.pool.owner_count(swa_block_id) != owners.get(swa_block_id, 0):
                raise InvariantViolated(f"SWA block {swa_block_id}: owners and tables disagree")

    def snapshot(self) -> ManagerSnapshot:
        """The whole state between two activations. O(pool)."""
        return {
            "epoch": self._epoch,
            "step_budget": self._step_budget,
            "cache": self.cache.snapshot(),
            "loading": self.loading.snapshot(),
            "requests": [
                (
                    request_id,
                    request.first_index,
                    request.num_reserved,
                    request.is_confirmed,
                    [e.swa_block_id for e in request.entries],
                )
                for request_id, request in self.requests.items()
            ],
        }

    def restore(self, snapshot: ManagerSnapshot) -> None:
        """Go on from a snapshot of a manager with the same configuration. Raises InvariantViolated for one
        that none could have given; then this one must not be used."""
        self._epoch, self._step_budget = snapshot["epoch"], snapshot["step_budget"]
        self.cache.restore(snapshot["cache"])
        self.loading.restore(snapshot["loading"])
        self.requests = {
            request_id: SwaRequest(first_index, self.cache.entries_of(blocks), num_reserved, is_confirmed)
            for request_id, first_index, num_reserved, is_confirmed, blocks in snapshot["requests"]
        }
        self.num_set_aside = sum(request.num_set_aside for request in self.requests.values())
        self._touched = []
        self.check()


def _edits(places: Iterable[tuple[int, int]]) -> tuple[BlockTableEdit, ...]:
    return tuple(BlockTableEdit(index=index, block_id=block_id) for index, block_id in places)
