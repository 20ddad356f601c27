"""What the fixed-batch policy knows of its batch, what it asks for, and how a round is taken back."""

from __future__ import annotations

from typing import Literal

import msgspec

from ksana.messages.base import PoolEpoch, RequestId
from ksana.messages.blocks import AllocateRequestBlocks, NewRequestBlocks, PlanBlocks, ReleaseRequest
from ksana.messages.perf import InferRequest
from ksana.messages.steps import Rehearsal
from ksana.scheduling.request_state import RequestState
from ksana.scheduling.settings import SchedulerSettings
from ksana.scheduling.state import OpenPlan, SchedulerState
from ksana.scheduling.stop_rules import StopRules

_NEVER = StopRules(eos_token_ids=frozenset(), stop_token_ids=frozenset(), min_tokens=0, max_tokens=1 << 40)
"""No sampled token ends a request."""


class Member(msgspec.Struct):
    """One request of the batch: a round computes its tokens [start, end)."""

    request_id: RequestId
    start: int
    end: int
    num_reported_computed: int = 0
    """What the block allocator knows to be computed, once the walk is over."""


class Batch(msgspec.Struct):
    members: list[Member]
    fill: Rehearsal
    stage: Literal["walk", "last_dry_step", "rounds"] = "walk"
    epoch: PoolEpoch | None = None
    """Of the worker that it began on."""
    planned: Rehearsal | None = None
    """How the step of the open plan is to be run."""
    num_rows: int = 0
    """Of the last step that was sent: fewer than there are members if some found no room."""


def request_state(request: InferRequest, now_s: float) -> RequestState:
    return RequestState(
        request_id=request.request_id,
        prompt_token_ids=request.token_ids,
        sampling=request.sampling,
        suppressed_token_ids=(),
        stop_rules=_NEVER,
        cache_salt=request.cache_salt,
        deadline_s=float("inf"),
        arrival_time_s=now_s,
    )


def walk_demands(
    state: SchedulerState, settings: SchedulerSettings, batch: Batch
) -> list[AllocateRequestBlocks]:
    """The next chunks of those that have not come to their start, in order, within the token budget."""
    demands = []
    budget = settings.max_num_batched_tokens
    for member in batch.members:
        request = state.requests[member.request_id]
        num_tokens = min(budget, member.start - request.num_scheduled)
        if num_tokens > 0:
            demands.append(_demand(request, request.num_scheduled, num_tokens))
            budget -= num_tokens
    return demands


def round_demands(state: SchedulerState, batch: Batch) -> list[AllocateRequestBlocks]:
    """New requests (in the last dry step, those without a prefix) go last: room is then no more set aside for
    those that run."""
    demands = [
        _demand(state.requests[member.request_id], member.start, member.end - member.start)
        for member in batch.members
    ]
    return sorted(demands, key=lambda demand: demand.new is not None)


def _demand(request: RequestState, start: int, num_tokens: int) -> AllocateRequestBlocks:
    """Nothing is reserved for a new request: whether the whole batch fits was found out before."""
    new = None
    if request.phase == "waiting":
        new = NewRequestBlocks(token_ids=request.prompt_token_ids, cache_salt=request.cache_salt)
    return AllocateRequestBlocks(
        request_id=request.request_id, num_computed_tokens=start, num_tokens=num_tokens, new=new
    )


def ask(
    state: SchedulerState, settings: SchedulerSettings, demands: list[AllocateRequestBlocks]
) -> PlanBlocks:
    state.last_step_id += 1
    step_id = state.last_step_id
    request_ids = [demand.request_id for demand in demands]
    for request_id in request_ids:
        state.requests[request_id].in_plan = True
    state.plan = OpenPlan(step_id=step_id, request_ids=request_ids, num_changes=state.num_changes)
    updates, state.updates = state.updates, []
    releases, state.releases = state.releases, []
    return PlanBlocks(
        pool_epoch=state.pool_epoch,
        step_id=step_id,
        done_step_id=(state.steps[0].step_id if state.steps else step_id) - 1,
        token_budget=settings.max_num_batched_tokens,
        updates=tuple(updates),
        releases=tuple([ReleaseRequest(request_id=request_id) for request_id in releases]),
        demands=tuple(demands),
    )


def roll_back(state: SchedulerState, batch: Batch) -> None:
    """As if no round had been: the next one computes the same tokens, with the same to sample.

    Also while a round is in flight, for the one that is planned ahead; its results are rolled back in turn.
    """
    for member in batch.members:
        request = state.requests[member.request_id]
        request.num_computed = request.num_scheduled = member.start
        request.num_samples_in_flight = 0
        request.output_token_ids.clear()
        request.num_reported_computed = member.num_reported_computed
        request.num_reported_tokens = request.num_tokens
    state.updates = []
