"""A workload that begins when the workers have started, so that nobody waits for that."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from simulations.requests import Ending, SimRequest, Workload
from simulations.scenario import WorldSpec


def ready_s(world: WorldSpec) -> float:
    """When every worker has started, and a moment more."""
    return max(engine.start_time_s for engine in world.engines) + 1.0


class WhenReady(Workload):
    """The workload, `ready_s` later. What follows on an ending needs no shift."""

    def __init__(self, workload: Workload, world: WorldSpec) -> None:
        self._workload = workload
        self._by_s = ready_s(world)

    def first(self) -> Iterator[SimRequest]:
        for request in self._workload.first():
            yield msgspec.structs.replace(request, arrival_s=request.arrival_s + self._by_s)

    def after(self, ending: Ending) -> SimRequest | None:
        return self._workload.after(ending)
