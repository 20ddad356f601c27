"""The sliding layers' side of remote loading, and of blocks that are written back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import msgspec

from ksana.cache.cache_config import CacheConfig, ceil_div
from ksana.cache.swa_cache import SwaCache
from ksana.cache.swa_entry import SwaEntry
from ksana.cache.window_match import last_valid_end, registered_blocks
from ksana.errors import InvariantViolated
from ksana.messages.base import RequestId
from ksana.messages.blocks import NO_BLOCK
from ksana.messages.swa_remote import (
    SwaCallRefused,
    SwaConfirm,
    SwaConfirmed,
    SwaHeld,
    SwaHold,
    SwaProbe,
    SwaProbed,
    SwaReserve,
    SwaReserved,
)


class SwaRequest(msgspec.Struct):
    """The SWA block table of a request that runs: entries for blocks first_index, first_index + 1, ..."""

    first_index: int
    entries: list[SwaEntry]
    num_reserved: int = 0
    """Blocks it may need at once while its prompt is computed."""
    is_confirmed: bool = False
    """It got its start from a remote load, and does not run yet."""

    @property
    def end_index(self) -> int:
        return self.first_index + len(self.entries)

    @property
    def num_set_aside(self) -> int:
        return max(0, self.num_reserved - len(self.entries))


class SwaLoad(msgspec.Struct):
    """A request that is loading. The load is a holder of every pinned and every reserved block."""

    pinned: list[SwaEntry]
    num_reserved: int
    """Blocks it may need at once, from now until its prompt is computed."""
    slots: list[int] = []
    """Reserved SWA block ids, not bound to a position."""

    @property
    def num_set_aside(self) -> int:
        return max(0, self.num_reserved - len(self.pinned) - len(self.slots))


class SwaLoadingSnapshot(TypedDict):
    """An SwaLoading as plain values. A load: request id, blocks reserved, SWA blocks pinned, slots. A hold:
    its id, SWA blocks."""

    loads: list[tuple[RequestId, int, list[int], list[int]]]
    holds: list[tuple[int, list[int]]]


class SwaLoading:
    """Loads and holds of one SwaCache. `room` in the calls below: blocks that nobody else was promised."""

    def __init__(self, config: CacheConfig, cache: SwaCache) -> None:
        self.config = config
        self.cache = cache
        self.loads: dict[RequestId, SwaLoad] = {}
        self.holds: dict[int, list[SwaEntry]] = {}
        self.num_set_aside = 0
        """Sum over the loads."""

    # Loads

    def probe(self, call: SwaProbe, room: int, step_budget: int) -> SwaProbed | SwaCallRefused:
        """Find the endpoint, pin its window and whatever is valid in the last window of the FA hit (an
        endpoint behind the hit needs that), and set aside the request's whole need."""
        if call.request_id in self.loads:
            raise InvariantViolated(f"request {call.request_id} is loading already")
        config, cache = self.config, self.cache
        valid = tuple(cache.valid(call.fa_blocks))
        endpoint = self._endpoint(valid)
        window = registered_blocks(endpoint, config.window_blocks)
        tail = registered_blocks(len(valid), config.window_blocks)
        indices = [*window, *(index for index in tail if valid[index] and index not in window)]
        num_blocks = ceil_div(max(call.num_total_tokens, call.num_reserved_tokens), config.block_size)
        num_reserved = config.num_swa_peak(num_blocks, min(step_budget, call.num_total_tokens))
        fa_block_ids = [call.fa_blocks[index].fa_block_id for index in indices]
        room -= sum(map(cache.is_reclaimable, fa_block_ids))
        num_needed = num_reserved - len(indices)
        if num_needed > room:
            detail = f"{num_needed} SWA blocks needed, room for {max(0, room)}"
            return SwaCallRefused(pool_epoch=call.pool_epoch, request_id=call.request_id, detail=detail)
        load = SwaLoad([cache.hold(fa_block_id) for fa_block_id in fa_block_ids], num_reserved)
        self.loads[call.request_id] = load
        self.num_set_aside += load.num_set_aside
        return SwaProbed(
            pool_epoch=call.pool_epoch, request_id=call.request_id, endpoint=endpoint, valid=valid
        )

    def reserve(self, call: SwaReserve, room: int) -> SwaReserved | SwaCallRefused:
        """Blocks to load into. What was set aside for this load comes first."""
        load, cache = self._loading(call.request_id), self.cache
        room = min(cache.room, load.num_set_aside + max(0, room))
        if call.num_blocks > room:
            detail = f"{call.num_blocks} SWA blocks needed, room for {room}"
            return SwaCallRefused(pool_epoch=call.pool_epoch, request_id=call.request_id, detail=detail)
        self.num_set_aside -= load.num_set_aside
        load.slots = cache.reserve(call.num_blocks)
        self.num_set_aside += load.num_set_aside
        return SwaReserved(
            pool_epoch=call.pool_epoch, request_id=call.request_id, swa_block_ids=tuple(load.slots)
        )

    def confirm(self, call: SwaConfirm, step_budget: int) -> tuple[SwaRequest, SwaConfirmed]:
        """Loaded blocks move to their positions and become fixed, then section 2's match runs again. Its
        blocks are referenced by the request, which does not run yet: their hits are counted when it does."""
        load, config, cache = self._pop(call.request_id), self.config, self.cache
        path = call.fa_blocks
        local_endpoint = self._endpoint(cache.valid(path[: call.num_local]))
        bound = []
        for slot, index in zip(load.slots, call.matched_indices, strict=True):
            if index < 0 or cache.is_valid(path[index]):
                cache.free_reserved((slot,))
            else:
                bound.append(cache.bind(slot, index, path[index]))
        endpoint = self._endpoint(cache.valid(path))
        window = registered_blocks(endpoint, config.window_blocks)
        entries = [cache.set_reclaimable(path[index].fa_block_id, False) for index in window]
        cache.unhold(load.pinned)
        cache.unhold(bound)
        num_blocks = ceil_div(max(call.num_total_tokens, call.num_reserved_tokens), config.block_size)
        num_left = call.num_total_tokens - endpoint * config.block_size
        num_reserved = config.num_swa_peak(num_blocks - window.start, min(step_budget, num_left))
        return SwaRequest(window.start, entries, num_reserved, is_confirmed=True), SwaConfirmed(
            pool_epoch=call.pool_epoch,
            request_id=call.request_id,
            endpoint=endpoint,
            local_endpoint=local_endpoint,
        )

    def drop(self, request_id: RequestId) -> None:
        """Pins and reserved blocks go back."""
        load = self._pop(request_id)
        self.cache.free_reserved(load.slots)
        self.cache.unhold(load.pinned)

    def _endpoint(self, valid: Sequence[bool]) -> int:
        return last_valid_end(
            valid, self.config.window_blocks, window_open_at_start=self.config.window_open_at_start
        )

    def _loading(self, request_id: RequestId) -> SwaLoad:
        load = self.loads.get(request_id)
        if load is None:
            raise InvariantViolated(f"request {request_id} is not loading")
        return load

    def _pop(self, request_id: RequestId) -> SwaLoad:
        load = self._loading(request_id)
        del self.loads[request_id]
        self.num_set_aside -= load.num_set_aside
        return load

    # Holds

    def hold(self, call: SwaHold) -> SwaHeld:
        """Keep the fixed SWA blocks of these FA blocks, where there are any."""
        if call.hold_id in self.holds:
            raise InvariantViolated(f"hold {call.hold_id} is there already")
        entries: list[SwaEntry] = []
        swa_block_ids = []
        for block in call.blocks:
            if self.cache.is_valid(block):
                entries.append(self.cache.hold(block.fa_block_id))
                swa_block_ids.append(entries[-1].swa_block_id)
            else:
                swa_block_ids.append(NO_BLOCK)
        self.holds[call.hold_id] = entries
        return SwaHeld(pool_epoch=call.pool_epoch, hold_id=call.hold_id, swa_block_ids=tuple(swa_block_ids))

    def release_held(self, hold_id: int) -> None:
        entries = self.holds.pop(hold_id, None)
        if entries is None:
            raise InvariantViolated(f"there is no hold {hold_id}")
        self.cache.unhold(entries)

    # Checks

    def check(self) -> None:
        """O(pool): every holder is a load or a hold, and the other way round."""
        set_aside = sum(load.num_set_aside for load in self.loads.values())
        if set_aside != self.num_set_aside:
            raise InvariantViolated(
                f"{set_aside} SWA blocks are set aside for loads, not {self.num_set_aside}"
            )
        holders = [0] * self.cache.pool.num_blocks
        for load in self.loads.values():
            for entry in load.pinned:
                holders[entry.swa_block_id] += 1
            for slot in load.slots:
                holders[slot] += 1
                if self.cache.pool.owner_count(slot) or self.cache.has_entry(slot):
                    raise InvariantViolated(f"others see SWA block {slot}, which is reserved for a load")
        for entries in self.holds.values():
            for entry in entries:
                holders[entry.swa_block_id] += 1
        for swa_block_id, num_holders in enumerate(holders):
            if self.cache.pool.holder_count(swa_block_id) != num_holders:
                raise InvariantViolated(
                    f"SWA block {swa_block_id} has {num_holders} holders by loads and holds"
                )

    def snapshot(self) -> SwaLoadingSnapshot:
        """The whole state as plain values."""
        return {
            "loads": [
                (request_id, load.num_reserved, [e.swa_block_id for e in load.pinned], list(load.slots))
                for request_id, load in self.loads.items()
            ],
            "holds": [
                (hold_id, [entry.swa_block_id for entry in entries])
                for hold_id, entries in self.holds.items()
            ],
        }

    def restore(self, snapshot: SwaLoadingSnapshot) -> None:
        """Go on from a snapshot. The SwaCache was restored before."""
        entries_of = self.cache.entries_of
        self.loads = {
            request_id: SwaLoad(entries_of(pinned), num_reserved, list(slots))
            for request_id, num_reserved, pinned, slots in snapshot["loads"]
        }
        self.holds = {hold_id: entries_of(blocks) for hold_id, blocks in snapshot["holds"]}
        self.num_set_aside = sum(load.num_set_aside for load in self.loads.values())
        if not all(0 <= s < self.cache.pool.num_blocks for load in self.loads.values() for s in load.slots):
            raise InvariantViolated("slots that the SWA pool does not have")
        self.check()
