"""The SWA block tables of requests that run, and what a step needs of SWA blocks."""

from __future__ import annotations

from collections.abc import Iterable

from ksana.cache.cache_config import CacheConfig, ceil_div
from ksana.cache.swa_cache import SwaCache
from ksana.cache.swa_entry import SwaEntry
from ksana.cache.swa_loading import SwaLoading, SwaRequest
from ksana.cache.window_match import last_valid_end, registered_blocks
from ksana.errors import InvariantViolated
from ksana.messages.base import RequestId
from ksana.messages.blocks import NO_BLOCK, BlockTableEdit
from ksana.messages.swa import SwaDemand, SwaGranted, SwaRefused, SwaRelease, SwaUpdate

TableSnapshot = tuple[RequestId, int, int, bool, list[int]]
"""A request: its id, first_index, num_reserved, is_confirmed, SWA blocks."""


class SwaTables:
    """Requests and their SWA blocks.

    Invariants: every block in a table is owned by it; `num_set_aside` is the sum over requests; a demand that
    is refused leaves everything as it was.
    """

    def __init__(self, config: CacheConfig, cache: SwaCache, loading: SwaLoading) -> None:
        self.config = config
        self.cache = cache
        self._loading = loading
        self.requests: dict[RequestId, SwaRequest] = {}
        self.num_set_aside = 0
        """Blocks that admission promised to these requests and that they have not taken yet."""

    @property
    def room(self) -> int:
        """Blocks that can be had and were promised to nobody."""
        return self.cache.room - self.num_set_aside - self._loading.num_set_aside

    def adopt(self, request_id: RequestId, request: SwaRequest) -> None:
        """A load has given the request its first blocks."""
        self.requests[request_id] = request
        self.num_set_aside += request.num_set_aside

    # What done steps have computed

    def update(self, update: SwaUpdate, changes: dict[int, int]) -> list[int]:
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

    def release(self, release: SwaRelease) -> None:
        """The request has no table any more; what it has filled stays as cache."""
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

    def take_all(
        self, demands: Iterable[SwaDemand], token_budget: int
    ) -> tuple[list[SwaGranted], list[SwaRefused]]:
        """Blocks for a step's demands, in their order; none for a new one behind a refusal."""
        grants: list[SwaGranted] = []
        refusals: list[SwaRefused] = []
        budget = token_budget
        for demand in demands:
            outcome: SwaGranted | SwaRefused
            if not demand.is_new:
                outcome = self.take_for_running(demand, budget)
            elif refusals:
                outcome = SwaRefused(request_id=demand.request_id, reason="behind")
            elif demand.request_id in self.requests:
                outcome = self.take_for_confirmed(demand, budget)
            else:
                outcome = self.take_for_new(demand, budget, token_budget)
            if isinstance(outcome, SwaGranted):
                budget -= outcome.num_tokens
                grants.append(outcome)
            else:
                refusals.append(outcome)
        return grants, refusals

    def take_for_running(self, demand: SwaDemand, budget: int) -> SwaGranted | SwaRefused:
        """Blocks for the next tokens of a running request."""
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

    def take_for_new(self, demand: SwaDemand, budget: int, step_budget: int) -> SwaGranted | SwaRefused:
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
        room = self.room - num_pinned
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

    def take_for_confirmed(self, demand: SwaDemand, budget: int) -> SwaGranted | SwaRefused:
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
        if num_fresh > min(cache.room, request.num_set_aside + max(0, self.room)):
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
            request_id=demand.request_id, start=start, num_tokens=num_tokens, edits=edits_of(places)
        )

    # Checks

    def check_owned(self, request_ids: Iterable[RequestId]) -> None:
        """What these requests read belongs to somebody, O(their blocks)."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            for entry in request.entries if request is not None else ():
                if not self.cache.pool.owner_count(entry.swa_block_id):
                    raise InvariantViolated(f"request {request_id} reads a block nobody owns: {entry}")

    def check(self) -> None:
        """Tables, owners and what is set aside say the same, O(pool)."""
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

    def snapshot(self) -> list[TableSnapshot]:
        """All requests as plain values."""
        return [
            (
                request_id,
                request.first_index,
                request.num_reserved,
                request.is_confirmed,
                [e.swa_block_id for e in request.entries],
            )
            for request_id, request in self.requests.items()
        ]

    def restore(self, snapshot: Iterable[TableSnapshot]) -> None:
        """Go on from a snapshot; the cache has been restored before."""
        self.requests = {
            request_id: SwaRequest(first_index, self.cache.entries_of(blocks), num_reserved, is_confirmed)
            for request_id, first_index, num_reserved, is_confirmed, blocks in snapshot
        }
        self.num_set_aside = sum(request.num_set_aside for request in self.requests.values())


def edits_of(places: Iterable[tuple[int, int]]) -> tuple[BlockTableEdit, ...]:
    """Of (index, block id)."""
    return tuple(BlockTableEdit(index=index, block_id=block_id) for index, block_id in places)
