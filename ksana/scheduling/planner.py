"""The question of one step: who should run, for how many tokens, in which order."""

from __future__ import annotations

from ksana.messages.blocks import AllocateRequestBlocks, NewRequestBlocks, PlanBlocks, ReleaseRequest
from ksana.scheduling.settings import SchedulerSettings, reserved_tokens
from ksana.scheduling.state import OpenPlan, SchedulerState

PLANS_SKIPPED_WITHOUT_ROOM = 8
"""How many plans pass before a waiting request that found no room is matched and asked for again, unless
blocks are released before (sliding windows give room without a release, so waiting for one is not enough), or
some were released when it was refused, and only a step in flight still named them."""


def make_plan(state: SchedulerState, settings: SchedulerSettings) -> PlanBlocks | None:
    """The next batch for the block allocator, or None while there is nothing to ask or no place for a step.

    Order of demands: running decodes, running prefills (chunks), waiting requests, each by arrival. The
    next step is planned as if every running row in flight went on by one token.
    """
    if state.plan is not None or state.worker != "ready" or len(state.steps) >= settings.max_steps:
        return None
    if state.stalled_at == state.num_changes:
        return None
    if state.releases:
        state.plans_to_skip = 0
    demands, budget = _running_demands(state, settings)
    if budget > 0 and state.waiting and not (state.is_step_held and demands):
        _add_waiting_demands(state, settings, demands, budget)
    state.is_step_held = False
    if not demands and not state.releases:
        return None

    state.last_step_id += 1
    requests = state.requests
    request_ids = [demand.request_id for demand in demands]
    for request_id in request_ids:
        requests[request_id].in_plan = True
    state.plan = OpenPlan(step_id=state.last_step_id, request_ids=request_ids, num_changes=state.num_changes)
    plan = PlanBlocks(
        pool_epoch=state.pool_epoch,
        step_id=state.last_step_id,
        done_step_id=(state.steps[0].step_id if state.steps else state.last_step_id) - 1,
        token_budget=settings.max_num_batched_tokens,
        updates=tuple(state.updates),
        releases=tuple([ReleaseRequest(request_id=request_id) for request_id in state.releases]),
        demands=tuple(demands),
    )
    state.updates = []
    state.releases = []
    return plan


def _running_demands(
    state: SchedulerState, settings: SchedulerSettings
) -> tuple[list[AllocateRequestBlocks], int]:
    """Demands of running requests, and the token budget they leave."""
    requests = state.requests
    demands = []
    prefills = []
    budget = settings.max_num_batched_tokens
    for request_id in state.running:
        request = requests[request_id]
        left = request.num_left()
        if left == 1:
            demands.append(
                AllocateRequestBlocks(
                    request_id=request_id, num_computed_tokens=request.num_scheduled, num_tokens=1
                )
            )
            budget -= 1
        elif left:
            prefills.append((request, left))
    for request, left in prefills:
        if budget <= 0:
            break
        num_tokens = min(left, budget)
        demands.append(
            AllocateRequestBlocks(
                request_id=request.request_id,
                num_computed_tokens=request.num_scheduled,
                num_tokens=num_tokens,
            )
        )
        budget -= num_tokens
    return demands, budget


def _add_waiting_demands(
    state: SchedulerState, settings: SchedulerSettings, demands: list[AllocateRequestBlocks], budget: int
) -> None:
    """Demands of waiting requests, first come first served.

    How long their cached prefixes are only the allocator knows, so more are asked for than the budget may
    hold; it cuts the last chunk and refuses the rest.
    """
    room = settings.max_running - len(state.running)
    room = min(room, settings.max_new_per_plan, budget)
    if room <= 0:
        return
    if state.plans_to_skip and state.running:
        state.plans_to_skip -= 1
        return
    if state.trials.active and state.leaving:
        return  # a suspect is tried with nobody else in the executor
    pool_tokens = state.fa_use.num_blocks * settings.block_size if state.fa_use is not None else 0
    for request_id in state.waiting:
        if not state.trials.may_run(request_id):
            continue
        request = state.requests[request_id]
        demands.append(
            AllocateRequestBlocks(
                request_id=request_id,
                num_computed_tokens=0,
                num_tokens=request.num_tokens,
                new=NewRequestBlocks(
                    token_ids=request.token_ids(),
                    cache_salt=request.cache_salt,
                    num_reserved_tokens=reserved_tokens(request, settings, len(state.running), pool_tokens),
                    num_tokens_at_most=request.num_kv_tokens,
                    resumed=request.num_cached_tokens is not None,
                ),
            )
        )
        room -= 1
        if not room:
            break
