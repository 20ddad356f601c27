"""How a request enters, ends, steps aside and leaves: every change of phase but admission."""

from __future__ import annotations

from ksana.messages.blocks import UpdateRequestTokens
from ksana.messages.outputs import Failed, Finished, Outcome, RequestEnded, RequestTiming, Usage
from ksana.messages.requests import AddRequest
from ksana.scheduling.activation import Activation
from ksana.scheduling.remote_loads import cancel_load
from ksana.scheduling.request_state import RequestState
from ksana.scheduling.settings import SchedulerSettings
from ksana.scheduling.state import SchedulerState, remove_sorted
from ksana.scheduling.stop_rules import StopRules, suppressed_token_ids


def add(state: SchedulerState, settings: SchedulerSettings, message: AddRequest, act: Activation) -> None:
    """Take a request into the queue, or end it at once if it cannot be served."""
    state.counters.num_added += 1
    prompt_len = len(message.prompt_token_ids)
    refusal = _refusal(state, settings, prompt_len)
    if refusal is not None:
        _count(state, refusal)
        usage = Usage(num_prompt_tokens=prompt_len, num_output_tokens=0)
        timing = RequestTiming(arrival_s=message.arrival_time_s)
        act.ended(RequestEnded(request_id=message.request_id, outcome=refusal, usage=usage, timing=timing))
        return
    if not has_work(state):
        state.last_progress_s = act.now_s
    request = RequestState(
        request_id=message.request_id,
        prompt_token_ids=message.prompt_token_ids,
        sampling=message.sampling,
        suppressed_token_ids=suppressed_token_ids(message.sampling, message.eos_token_ids),
        stop_rules=StopRules.of(message.sampling, message.eos_token_ids, prompt_len, settings.max_model_len),
        cache_salt=message.cache_salt,
        deadline_s=message.deadline_s,
        arrival_time_s=message.arrival_time_s,
    )
    state.requests[message.request_id] = request
    state.to_waiting(request)
    state.add_deadline(request)


def _refusal(state: SchedulerState, settings: SchedulerSettings, prompt_len: int) -> Failed | None:
    if state.draining:
        return Failed(status=503, message=state.refusal, code="shutting_down")
    if state.worker == "lost":
        return Failed(status=503, message=state.refusal, code="worker_lost")
    if prompt_len == 0:
        return Failed(
            status=400,
            message="The prompt is empty: it needs at least one token",
            error_type="invalid_request_error",
            param="prompt",
        )
    if prompt_len >= settings.max_model_len:
        return Failed(
            status=400,
            message=f"The prompt has {prompt_len} tokens, which leaves no room for output in a context of "
            f"{settings.max_model_len}",
            error_type="invalid_request_error",
            param="prompt",
            code="context_length_exceeded",
        )
    return None


def has_work(state: SchedulerState) -> bool:
    """Some request is not ended yet."""
    return bool(state.waiting or state.running or state.loading) or any(
        state.requests[request_id].phase == "preempting" for request_id in state.leaving
    )


def end(
    state: SchedulerState,
    request: RequestState,
    outcome: Outcome,
    act: Activation,
    num_output_tokens: int | None = None,
) -> None:
    """Tell the producer that the request ended. Its blocks go back once no step, plan or load
    names it.

    `num_output_tokens`: how many of its tokens count, when not all do.
    """
    if num_output_tokens is None:
        num_output_tokens = len(request.output_token_ids)
    else:
        act.truncate(request.request_id, num_output_tokens)
    cancel_load(request, act)
    _leave(state, request)
    request.phase = "ended"
    state.last_progress_s = act.now_s
    _count(state, outcome)
    act.ended(
        RequestEnded(
            request_id=request.request_id,
            outcome=outcome,
            usage=request.usage(num_output_tokens),
            timing=request.timing(),
        )
    )


def step_aside(state: SchedulerState, request: RequestState) -> None:
    """Take a running request's blocks as soon as no step names it, and let it wait again. The results of
    steps in flight still count."""
    _leave(state, request)
    request.phase = "preempting"


def _leave(state: SchedulerState, request: RequestState) -> None:
    if request.phase == "waiting":
        remove_sorted(state.waiting, request.request_id)
        if request.request_id == state.short_of_room:
            state.plans_to_skip = 0  # the next in the queue may fit
    elif request.phase == "loading":
        remove_sorted(state.loading, request.request_id)
    elif request.phase == "running":
        remove_sorted(state.running, request.request_id)
    if request.phase in ("waiting", "loading", "running"):
        state.leaving.append(request.request_id)


def _count(state: SchedulerState, outcome: Outcome) -> None:
    counters = state.counters
    if isinstance(outcome, Finished):
        if outcome.reason == "stop":
            counters.num_stopped += 1
        else:
            counters.num_length += 1
    elif isinstance(outcome, Failed):
        counters.num_failed += 1
    else:
        counters.num_aborted += 1


def retire_leaving(state: SchedulerState, settings: SchedulerSettings) -> None:
    """Release the blocks of those that left and that no step, plan or load names any more."""
    still_named = []
    for request_id in state.leaving:
        request = state.requests[request_id]
        if request.num_in_flight or request.in_plan or request.is_loading:
            still_named.append(request_id)
            continue
        state.num_changes += 1
        if request.holds_blocks:
            report_computed(state, request, settings)
            state.releases.append(request_id)
        if request.on_worker:
            state.drops.append(request_id)
        if state.edits:
            state.edits = [edit for edit in state.edits if edit.request_id != request_id]
        if request.phase == "preempting":
            forget_run(request)
            state.to_waiting(request)
        else:
            del state.requests[request_id]
    state.leaving = still_named


def forget_run(request: RequestState) -> None:
    """Nothing of it is on the worker or in the pools any more: it will be computed from its tokens.

    Not called while a load is open but for the loss of the worker, which makes loads void.
    """
    request.is_loading = request.is_load_cancelled = False
    request.in_plan = request.holds_blocks = request.on_worker = request.kv_is_suspect = False
    request.num_scheduled = request.num_computed = 0
    request.num_in_flight = request.num_samples_in_flight = 0
    request.num_reported_computed = request.num_reported_tokens = 0


def report_computed(state: SchedulerState, request: RequestState, settings: SchedulerSettings) -> None:
    """Tell the block allocator what is computed, but only when that fills a block or moves one out of the
    window: nothing else is of use to it, and so a decode is reported once or twice in `block_size` steps."""
    computed, before = request.num_computed, request.num_reported_computed
    size = settings.block_size
    if computed // size == before // size:
        window = settings.sliding_window
        if window is None or (computed - window) // size == (before - window) // size:
            return
    if request.kv_is_suspect:
        return
    state.updates.append(
        UpdateRequestTokens(
            request_id=request.request_id,
            token_ids=request.token_ids_from(request.num_reported_tokens),
            num_computed_tokens=computed,
        )
    )
    request.num_reported_computed = computed
    request.num_reported_tokens = request.num_tokens
