"""The answer of the block allocator: admission, the step plan, preemption."""

from __future__ import annotations

from ksana.errors import InvariantViolated
from ksana.messages.blocks import BlocksGranted, BlocksPlanned, PoolUse, TableEdits
from ksana.messages.outputs import Failed
from ksana.messages.steps import NewRow, Row, StepPlan
from ksana.scheduling.activation import Activation
from ksana.scheduling.lifecycle import end, step_aside
from ksana.scheduling.planner import PLANS_SKIPPED_WITHOUT_ROOM
from ksana.scheduling.remote_loads import RETRY_HELD_AFTER_S, give_up_own, make_room
from ksana.scheduling.request_state import RequestState
from ksana.scheduling.settings import SchedulerSettings
from ksana.scheduling.state import SchedulerState, StepInFlight

NOBODY = -1
"""Lower than every request id."""


def take_answer(
    state: SchedulerState, settings: SchedulerSettings, answer: BlocksPlanned, act: Activation
) -> None:
    """Close the open plan: refusals first (they may cost a granted request its place), then the step."""
    plan = state.plan
    if plan is None or answer.pool_epoch != state.pool_epoch or answer.step_id != plan.step_id:
        state.counters.num_late_messages += 1
        return
    state.plan = None
    state.fa_use = answer.fa_use
    state.swa_use = answer.swa_use
    state.cache = answer.counters
    requests = state.requests
    for request_id in plan.request_ids:
        requests[request_id].in_plan = False
    for grant in answer.grants:
        requests[grant.request_id].holds_blocks = True
    state.edits.extend(answer.edits)
    state.copies.extend(answer.copies)
    # A step done or a request gone while the plan was open: the next plan may fare better, so that no
    # conclusion is drawn from what this one was refused.
    is_stale = plan.num_changes != state.num_changes
    in_need = _take_refusals(state, settings, answer, act)
    if in_need is not None and not is_stale and not _are_blocks_coming(state):
        _find_room(state, in_need, act)
    if settings.hold_when_short and _is_worth_waiting(state, answer, in_need, is_stale):
        _keep_edits(state, answer)
        state.is_step_held = True
        is_sent = False
    else:
        is_sent = _send_step(state, answer, act)
    if answer.refusals and not is_sent and not is_stale:
        _stall(state, settings, answer, act)


def _take_refusals(
    state: SchedulerState, settings: SchedulerSettings, answer: BlocksPlanned, act: Activation
) -> RequestState | None:
    """End what can never run. Returns who is first to lack room: a running request before a waiting one."""
    in_need: RequestState | None = None
    for refusal in answer.refusals:
        if refusal.reason == "loading":
            raise InvariantViolated(f"request {refusal.request_id} was planned while it is being loaded")
        request = state.alive(refusal.request_id)
        if request is None:
            continue
        if refusal.reason == "never":
            if not request.num_in_flight:  # else the token on its way may end it in peace
                end(state, request, _too_large(state, settings, request), act)
        elif refusal.reason == "no_room":
            if request.phase == "waiting":
                state.plans_to_skip = 0 if _is_room_coming(answer) else PLANS_SKIPPED_WITHOUT_ROOM
                state.short_of_room = request.request_id
            if request.phase in ("running", "waiting") and in_need is None:
                in_need = request
    return in_need


def _are_blocks_coming(state: SchedulerState) -> bool:
    """Of requests that left, or that the steps in flight bring to their limit for certain."""
    return bool(state.leaving or state.releases) or any(state.requests[i].is_ending() for i in state.running)


def _find_room(state: SchedulerState, request: RequestState, act: Activation) -> None:
    """Blocks of requests that do not run go first; only a running request takes another one's place."""
    if request.phase == "waiting":
        make_room(state, request.request_id, act)
    elif not make_room(state, NOBODY, act):
        _preempt(state)


def _stall(
    state: SchedulerState, settings: SchedulerSettings, answer: BlocksPlanned, act: Activation
) -> None:
    """Nothing could be had: do not ask again before something gives way. If nothing can, end the first."""
    if state.releases:
        return
    state.stalled_at = state.num_changes
    if state.steps or state.leaving or state.loading:
        return
    request = state.requests[answer.refusals[0].request_id]
    if give_up_own(state, request):
        return
    if _is_held(answer.fa_use) or _is_held(answer.swa_use):
        state.retry_at_s = act.now_s + RETRY_HELD_AFTER_S
        return
    end(state, request, _too_large(state, settings, request), act)


def _is_room_coming(answer: BlocksPlanned) -> bool:
    """Blocks were released that become idle when the step in flight is done, without any word of it."""
    return any(use is not None and use.num_deferred > 0 for use in (answer.fa_use, answer.swa_use))


def _is_held(use: PoolUse | None) -> bool:
    return use is not None and use.num_held > 0


def _preempt(state: SchedulerState) -> None:
    """Take the place of the running request that arrived last, unless only one runs.

    The oldest never loses its place, so everything ends. Most victims have a block of their own that becomes
    free; one whose blocks are all full and shared with others frees nothing but its need for the next.
    Not called while blocks are on their way back already. If a step names the victim it stays until that
    step is done.
    """
    if len(state.running) < 2:
        return
    victim = state.requests[state.running[-1]]
    step_aside(state, victim)
    victim.num_preemptions += 1
    state.counters.num_preemptions += 1


def _too_large(state: SchedulerState, settings: SchedulerSettings, request: RequestState) -> Failed:
    """It fits no pool, whoever else is there. That it does not is mostly known before its first token."""
    prompt_len, limit = len(request.prompt_token_ids), request.stop_rules.max_tokens
    num_blocks = state.fa_use.num_blocks if state.fa_use is not None else 0
    pool_tokens = num_blocks * settings.block_size
    text = (
        f"A prompt of {prompt_len} tokens and up to {limit} of output need KV for {request.num_kv_tokens} "
        f"tokens, as the last one needs none, and the KV pool holds {num_blocks} blocks of "
        f"{settings.block_size} tokens"
    )
    if request.num_kv_tokens <= pool_tokens:
        text += ", but that of the sliding-window layers is too small"
    elif prompt_len <= pool_tokens:
        text += f"; the largest max_tokens for this prompt is {pool_tokens + 1 - prompt_len}"
    else:
        text += f"; the longest prompt that fits has {pool_tokens} tokens, with max_tokens 1"
    text += ". A server with a larger --kv-cache-memory can serve it"
    if request.output_token_ids:
        return Failed(status=500, message=text)
    return Failed(
        status=400,
        message=text,
        error_type="invalid_request_error",
        param="max_tokens" if prompt_len <= pool_tokens < request.num_kv_tokens else "prompt",
        code="context_length_exceeded",
    )


def _is_worth_waiting(
    state: SchedulerState, answer: BlocksPlanned, in_need: RequestState | None, is_stale: bool
) -> bool:
    """A running request lacks blocks, and some are on their way back. Nobody new is in the step."""
    if in_need is None or in_need.phase not in ("running", "preempting"):
        return False
    if not (is_stale or state.steps or state.leaving or state.releases):
        return False
    return all(state.requests[grant.request_id].phase != "waiting" for grant in answer.grants)


def _keep_edits(state: SchedulerState, answer: BlocksPlanned) -> None:
    """The step is not sent: its tokens will be asked for again, but the blocks are granted, once."""
    for grant in answer.grants:
        if grant.fa_edits or grant.swa_edits:
            state.edits.append(
                TableEdits(request_id=grant.request_id, fa_edits=grant.fa_edits, swa_edits=grant.swa_edits)
            )


def _send_step(state: SchedulerState, answer: BlocksPlanned, act: Activation) -> bool:
    """The step plan from the grants, without those that left while the plan was open. False if none is left:
    then edits and copies wait for the next step."""
    requests = state.requests
    rows: list[Row] = []
    new: list[NewRow] = []
    for grant in answer.grants:
        request = requests[grant.request_id]
        if request.phase == "waiting":
            _admit(state, request, grant, act.now_s)
            new.append(_new_row(request))
        elif request.phase != "running":
            continue
        rows.append(_row(request, grant))
    if not rows:
        return False
    step = StepPlan(
        pool_epoch=state.pool_epoch,
        step_id=answer.step_id,
        rows=tuple(rows),
        new=tuple(new),
        drop=tuple(state.drops),
        edits=_edits_of_running(state),
        copies=tuple(state.copies),
    )
    act.said.append(("executor", step))
    state.steps.append(StepInFlight(step_id=step.step_id, rows=step.rows))
    state.drops = []
    state.edits = []
    state.copies = []
    return True


def _edits_of_running(state: SchedulerState) -> tuple[TableEdits, ...]:
    """Edits from merges, without those of requests that have left: the worker may not know them now."""
    if not state.edits:
        return ()
    running = set(state.running)
    return tuple([edit for edit in state.edits if edit.request_id in running])


def _admit(state: SchedulerState, request: RequestState, grant: BlocksGranted, now_s: float) -> None:
    state.to_running(request)
    request.num_scheduled = request.num_computed = grant.start
    request.num_reported_computed = grant.start
    request.num_reported_tokens = request.num_tokens
    request.on_worker = True
    if request.num_cached_tokens is None:
        request.num_cached_tokens = grant.start
        request.first_scheduled_s = now_s
        state.counters.num_prompt_tokens += len(request.prompt_token_ids)
        state.counters.num_cached_tokens += grant.start


def _new_row(request: RequestState) -> NewRow:
    return NewRow(
        request_id=request.request_id,
        prompt_len=len(request.prompt_token_ids),
        token_ids=request.token_ids(),
        sampling=request.sampling,
        suppressed_token_ids=request.suppressed_token_ids,
    )


def _row(request: RequestState, grant: BlocksGranted) -> Row:
    start = grant.start
    if start != request.num_scheduled:
        raise InvariantViolated(
            f"request {request.request_id}: blocks granted from token {start}, "
            f"but the next to compute is {request.num_scheduled}"
        )
    end_ = start + grant.num_tokens
    sample = end_ == request.num_tokens + request.num_samples_in_flight
    request.num_scheduled = end_
    request.num_in_flight += 1
    if sample:
        request.num_samples_in_flight += 1
    return Row(
        request_id=request.request_id,
        start=start,
        num_tokens=grant.num_tokens,
        sample=sample,
        fa_write_start=grant.fa_write_start,
        fa_edits=grant.fa_edits,
        swa_edits=grant.swa_edits,
    )
