"""Watches who is let in: what is set aside can be needed, and nobody takes what others were promised."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ksana.cache.block_allocator import BlockAllocator
from ksana.cache.cache_config import CacheConfig
from ksana.cache.fa_cache import FaCache
from ksana.cache.swa_manager import UNKNOWN_BUDGET, SWACacheManager
from ksana.cache.swa_tables import SwaTables
from ksana.messages.swa import SwaDemand, SwaGranted, SwaRefused
from ksana.messages.swa_remote import SwaAnswer, SwaCall, SwaConfirm, SwaConfirmed, SwaProbe
from simulations.checks.promises import BrokenPromise
from simulations.engine import EngineSpec

_P = ParamSpec("_P")
_R = TypeVar("_R")


class AdmissionWatch:
    """Of one engine. Stands around the calls that let a request in."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._fa: FaCache | None = None
        self._manager: SWACacheManager | None = None
        self._tables: SwaTables | None = None

    def attach(self, allocator: BlockAllocator, manager: SWACacheManager | None) -> None:
        """Look at the pools there are now; a reset makes new ones. Cheap when they are looked at already."""
        if self._fa is not allocator.fa:
            self._fa = allocator.fa
            _watch_fa(self._fa)
        if manager is None:
            return
        if self._manager is not manager:
            self._manager = manager
            _watch_swa(manager, self._spec.max_num_batched_tokens)
        if self._tables is not manager.tables:
            self._tables = manager.tables
            _watch_swa_tables(self._tables, self._spec.max_num_batched_tokens)


def check_lapsed(allocator: BlockAllocator, manager: SWACacheManager) -> None:
    """Loads have set aside what they may still take; a request that has come past what was reserved for it
    has nothing any more.

    The latter is true of engines whose reservations cover all tokens known at admission (or none), between
    batches: then a chunk that begins before the end of the reservation does not end behind it.
    """
    loads = manager.loading.loads.values()
    promised = sum(max(load.num_reserved - len(load.pinned) - len(load.slots), 0) for load in loads)
    if manager.loading.num_set_aside != promised:
        raise BrokenPromise(
            f"{manager.loading.num_set_aside} SWA blocks are set aside for loads, {promised} were promised"
        )
    for request_id, request in allocator.fa.requests.items():
        if not request.num_reserved_tokens or request.is_confirmed:
            continue
        swa = manager.tables.requests[request_id]
        num_blocks = -(-request.num_reserved_tokens // allocator.config.block_size)
        if swa.end_index > num_blocks and swa.num_reserved:
            raise BrokenPromise(
                f"request {request_id} has come to SWA block {swa.end_index}, {num_blocks} were reserved, "
                f"and still it may have {swa.num_reserved} at once before others are let in"
            )


def _watch_fa(fa: FaCache) -> None:
    def room() -> int:
        return fa.pool.num_free + fa.pool.num_cached - fa.num_set_aside

    for name in ("take_for_new", "take_for_confirmed"):
        setattr(fa, name, _keeping_promises(name, getattr(fa, name), room))


def _keeping_promises(name: str, take: Callable[_P, _R], room: Callable[[], int]) -> Callable[_P, _R]:
    """`room`: blocks that can be had and were promised to nobody. Decodes, which nobody may stop, can bring
    it below zero; who is let in cannot."""

    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        before = room()
        outcome = take(*args, **kwargs)
        if room() < min(0, before):
            raise BrokenPromise(f"{name} took what others were promised: room for {before}, now {room()}")
        return outcome

    return checked


def _watch_swa_tables(tables: SwaTables, budget: int) -> None:
    take_for_new = tables.take_for_new

    def new(demand: SwaDemand, left: int, step_budget: int) -> SwaGranted | SwaRefused:
        outcome = take_for_new(demand, left, step_budget)
        if isinstance(outcome, SwaGranted):
            end = max(outcome.start + outcome.num_tokens, demand.num_reserved_tokens)
            chunk = min(budget, demand.num_total_tokens - outcome.start)
            request = tables.requests[demand.request_id]
            check_reserved(tables.config, request.num_reserved, request.first_index, end, chunk)
        return outcome

    def room() -> int:
        return tables.room

    setattr(tables, "take_for_new", _keeping_promises("take_for_new", new, room))  # noqa: B010
    for_confirmed = _keeping_promises("take_for_confirmed", tables.take_for_confirmed, room)
    setattr(tables, "take_for_confirmed", for_confirmed)  # noqa: B010


def _watch_swa(manager: SWACacheManager, budget: int) -> None:
    confirm, answer_call = manager._confirm, manager._call

    def confirmed(call: SwaConfirm) -> SwaConfirmed:
        answer = confirm(call)
        chunk = call.num_total_tokens - answer.endpoint * manager.config.block_size
        if manager._step_budget != UNKNOWN_BUDGET:  # else no step was planned yet
            chunk = min(budget, chunk)
        end = max(call.num_total_tokens, call.num_reserved_tokens)
        request = manager.tables.requests[call.request_id]
        check_reserved(manager.config, request.num_reserved, request.first_index, end, chunk)
        return answer

    def called(call: SwaCall) -> list[SwaAnswer]:
        answers = answer_call(call)
        if isinstance(call, SwaProbe) and call.request_id in manager.loading.loads:
            chunk = call.num_total_tokens
            if manager._step_budget != UNKNOWN_BUDGET:
                chunk = min(budget, chunk)
            end = max(call.num_total_tokens, call.num_reserved_tokens)
            num_reserved = manager.loading.loads[call.request_id].num_reserved
            check_reserved(manager.config, num_reserved, 0, end, chunk)
        return answers

    setattr(manager, "_confirm", confirmed)  # noqa: B010
    setattr(manager, "_call", called)  # noqa: B010 - methods, to mypy


def check_reserved(config: CacheConfig, num_reserved: int, first_index: int, end: int, chunk: int) -> None:
    """A request that was just let in, from block `first_index` up to token `end`, by chunks of at most
    `chunk` tokens, may have as many SWA blocks at once as it can need: a window, what is computed and
    planned, and a block for where the window begins inside one. No more, or others wait for nothing; no less,
    or it finds no room later."""
    size = config.block_size
    at_once = -(-(config.sliding_window or 0) // size) + 1
    at_once += (2 if config.plan_ahead else 1) * -(-chunk // size)
    from_window_on = -(-end // size) - first_index
    expected = min(at_once, from_window_on, config.num_swa_blocks)
    if num_reserved != expected:
        raise BrokenPromise(
            f"{num_reserved} SWA blocks are reserved from block {first_index} to token "
            f"{end}, in chunks of {chunk}; it can need {expected}"
        )
