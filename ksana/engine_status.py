"""One snapshot of an engine out of what its parts say of themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from ksana.actors.device_executor import DeviceExecutor
from ksana.messages.blocks import CacheCounters, PoolUse
from ksana.messages.status import EngineStatus, JournalStatus, SchedulerCounters
from ksana.messages.stores import RemoteCacheStatus
from ksana.runtime.slots import Slots
from ksana.scheduling.status import SchedulerStatus

Counters = TypeVar("Counters", bound=msgspec.Struct)


@dataclass(slots=True)
class EngineCounters:
    """Totals of generations of actors that broke, so that counters never go back."""

    num_core_crashes: int = 0
    past: SchedulerCounters = field(default_factory=SchedulerCounters)
    past_cache: CacheCounters = field(default_factory=CacheCounters)

    def add_generation(self, last: SchedulerStatus) -> None:
        """The actors broke; `last` is what their scheduler counted."""
        self.num_core_crashes += 1
        self.past = _sum(self.past, _counters(last))
        self.past_cache = _sum(self.past_cache, last.cache or CacheCounters())


def engine_status(
    *,
    now_s: float,
    scheduler: SchedulerStatus,
    fa_use: PoolUse,
    swa_use: PoolUse | None,
    executor: DeviceExecutor,
    slots: Slots,
    counters: EngineCounters,
    broken: bool,
    draining: bool,
    remote: RemoteCacheStatus | None,
    journal: JournalStatus | None,
) -> EngineStatus:
    """The snapshot; cheap, no loop over requests."""
    return EngineStatus(
        now_s=now_s,
        last_progress_s=scheduler.last_progress_s,
        num_open_slots=len(slots),
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        fa_use=fa_use,
        swa_use=swa_use,
        cache=_sum(counters.past_cache, scheduler.cache or CacheCounters()),
        counters=_sum(counters.past, _counters(scheduler)),
        worker_state=executor.state,
        worker_epoch=executor.epoch,
        last_step_id=scheduler.last_step_id,
        num_worker_restarts=executor.num_restarts,
        num_core_crashes=counters.num_core_crashes,
        num_refused=slots.num_refused,
        broken=broken,
        draining=draining,
        num_loading=scheduler.num_loading,
        remote=remote,
        journal=journal,
    )


def _counters(status: SchedulerStatus) -> SchedulerCounters:
    counted = status.counters
    return SchedulerCounters(
        num_prompt_tokens=counted.num_prompt_tokens,
        num_output_tokens=counted.num_generated_tokens,
        num_computed_tokens=counted.num_computed_tokens,
        num_steps=counted.num_steps,
        num_preemptions=counted.num_preemptions,
        num_stopped=counted.num_stopped,
        num_length=counted.num_length,
        num_failed=counted.num_failed,
        num_aborted=counted.num_aborted,
    )


def _sum(one: Counters, two: Counters) -> Counters:
    """Field by field."""
    fields = one.__struct_fields__
    return type(one)(**{name: getattr(one, name) + getattr(two, name) for name in fields})
