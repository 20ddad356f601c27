"""All that a scheduler remembers between activations, as plain data that msgspec can write and read."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

import msgspec

from ksana.messages.base import PoolEpoch, RequestId, StepId
from ksana.messages.blocks import BlockCopy, CacheCounters, PoolUse, TableEdits, UpdateRequestTokens
from ksana.messages.remote import LoadOutcome
from ksana.messages.steps import Row
from ksana.scheduling.request_state import RequestState
from ksana.scheduling.status import SchedulerCounters, WorkerState
from ksana.scheduling.suspects import Trials


class StepInFlight(msgspec.Struct):
    step_id: StepId
    rows: tuple[Row, ...]


class OpenPlan(msgspec.Struct):
    """The PlanBlocks that is not answered yet."""

    step_id: StepId
    request_ids: list[RequestId]
    num_changes: int
    """The state's when it was sent. If that has grown, a refusal says nothing about now."""


class SchedulerState(msgspec.Struct, kw_only=True):
    """Invariants: `waiting`, `loading` and `running` are sorted and hold exactly the requests of that phase;
    `leaving` holds those that are preempting or ended. Ids are in the order of arrival: the lowest goes
    first."""

    requests: dict[RequestId, RequestState] = {}
    waiting: list[RequestId] = []
    loading: list[RequestId] = []
    running: list[RequestId] = []
    leaving: list[RequestId] = []
    deadlines: list[tuple[float, RequestId]] = []
    """A heap; entries of requests that are gone are skipped and now and then swept out."""

    worker: WorkerState = "starting"
    pool_epoch: PoolEpoch = -1
    draining: bool = False
    refusal: str = ""
    """Why requests are refused while `worker` is lost."""
    trials: Trials = msgspec.field(default_factory=Trials)

    last_step_id: StepId = 0
    plan: OpenPlan | None = None
    steps: list[StepInFlight] = []
    """In the executor, oldest first."""
    num_changes: int = 0
    """Counts what may give room for a refused demand: steps done, requests that left, pools emptied."""
    stalled_at: int = -1
    """A plan made at this count was refused as a whole, so another one would be too."""
    is_step_held: bool = False
    """The last plan lacked blocks and its step was not sent: the next one is for the same requests, and lets
    nobody in."""
    plans_to_skip: int = 0
    """A waiting request found no room: not asked for again in so many plans, unless blocks are released."""

    prefill_tokens_per_s: float = 0.0
    """Moving average over steps that are mostly prefill; 0 before the first."""
    num_loads: int = 0
    load_outcomes: dict[LoadOutcome, int] = {}
    short_of_room: RequestId | None = None
    """The waiting request that was last refused for lack of room; others are not loaded while it waits."""
    retry_at_s: float | None = None
    """Ask again then: all that is in the way is held for write-back."""

    updates: list[UpdateRequestTokens] = []
    releases: list[RequestId] = []
    drops: list[RequestId] = []
    edits: list[TableEdits] = []
    copies: list[BlockCopy] = []
    """These five go out with the next PlanBlocks (updates, releases) or StepPlan."""

    counters: SchedulerCounters = msgspec.field(default_factory=SchedulerCounters)
    last_progress_s: float = 0.0
    fa_use: PoolUse | None = None
    swa_use: PoolUse | None = None
    cache: CacheCounters | None = None

    def alive(self, request_id: RequestId) -> RequestState | None:
        """The request, unless it is unknown or ended."""
        request = self.requests.get(request_id)
        return None if request is None or request.phase == "ended" else request

    def num_open_loads(self) -> int:
        """Loads that are not answered yet, of ended requests as well."""
        return len(self.loading) + sum([self.requests[i].is_loading for i in self.leaving])

    def has_cancelled_load(self) -> bool:
        return any(self.requests[i].is_load_cancelled for i in self.loading)

    def to_loading(self, request: RequestState) -> None:
        remove_sorted(self.waiting, request.request_id)
        request.phase = "loading"
        insort(self.loading, request.request_id)

    def to_waiting(self, request: RequestState) -> None:
        if request.phase == "loading":
            remove_sorted(self.loading, request.request_id)
        request.phase = "waiting"
        insort(self.waiting, request.request_id)

    def to_running(self, request: RequestState) -> None:
        remove_sorted(self.waiting, request.request_id)
        request.phase = "running"
        insort(self.running, request.request_id)

    def next_deadline_s(self) -> float | None:
        while self.deadlines and self.alive(self.deadlines[0][1]) is None:
            heapq.heappop(self.deadlines)
        return self.deadlines[0][0] if self.deadlines else None

    def add_deadline(self, request: RequestState) -> None:
        if len(self.deadlines) > 2 * len(self.requests) + 64:
            self.deadlines = [entry for entry in self.deadlines if self.alive(entry[1]) is not None]
            heapq.heapify(self.deadlines)
        heapq.heappush(self.deadlines, (request.deadline_s, request.request_id))


def remove_sorted(ids: list[RequestId], request_id: RequestId) -> None:
    """Remove an id that is there from a sorted list."""
    index = bisect_left(ids, request_id)
    assert ids[index] == request_id
    del ids[index]
