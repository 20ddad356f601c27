"""A step is done: new tokens, endings, and suspects that are cleared."""

from __future__ import annotations

from ksana.errors import InvariantViolated
from ksana.messages.outputs import Failed
from ksana.messages.steps import Row, RowResult, StepDone, StepTimes
from ksana.scheduling.activation import Activation
from ksana.scheduling.lifecycle import end, report_computed
from ksana.scheduling.request_state import RequestState
from ksana.scheduling.settings import SchedulerSettings
from ksana.scheduling.state import SchedulerState

_MIN_PREFILL_TOKENS = 32


def take_results(state: SchedulerState, settings: SchedulerSettings, done: StepDone, act: Activation) -> None:
    """Account for one step. Results of a former worker are ignored and counted.

    Raises InvariantViolated when the executor answers for another step than the oldest, or not row by row.
    """
    if done.pool_epoch != state.pool_epoch or state.worker != "ready":
        state.counters.num_late_messages += 1
        return
    if not state.steps or state.steps[0].step_id != done.step_id:
        expected = state.steps[0].step_id if state.steps else None
        raise InvariantViolated(f"step {done.step_id} is done, but the oldest in flight is {expected}")
    step = state.steps.pop(0)
    if len(step.rows) != len(done.results):
        raise InvariantViolated(
            f"step {done.step_id} has {len(step.rows)} rows, but {len(done.results)} results came"
        )
    state.num_changes += 1
    state.last_progress_s = act.now_s
    counters = state.counters
    counters.num_steps += 1
    if settings.max_remote_loads:
        _measure_prefill(state, step.rows, done.times)
    requests = state.requests
    for row, result in zip(step.rows, done.results, strict=True):
        request = requests[row.request_id]
        request.num_in_flight -= 1
        if row.sample:
            request.num_samples_in_flight -= 1
        counters.num_computed_tokens += row.num_tokens
        if request.phase == "ended":
            counters.num_ignored_rows += 1
            _take_ignored_row(request, row, result)
            continue
        if result.error is not None or (row.sample and len(result.token_ids) != 1):
            _fail_row(state, request, row, result, act)
            continue
        request.num_computed = row.start + row.num_tokens
        if row.sample:
            _take_token(state, request, result.token_ids[0], act)
        if request.phase == "running":
            report_computed(state, request, settings)


def _measure_prefill(state: SchedulerState, rows: tuple[Row, ...], times: StepTimes) -> None:
    """Tokens per second of steps that are mostly prefill and not tiny; each new one counts a quarter."""
    num_tokens = sum([row.num_tokens for row in rows])
    num_prefill = sum([row.num_tokens for row in rows if row.num_tokens > 1])
    if num_tokens < _MIN_PREFILL_TOKENS or 4 * num_prefill < 3 * num_tokens or times.forward_ns <= 0:
        return
    speed = num_tokens * 1e9 / times.forward_ns
    before = state.prefill_tokens_per_s
    state.prefill_tokens_per_s = speed if not before else before + (speed - before) / 4


def _take_token(state: SchedulerState, request: RequestState, token_id: int, act: Activation) -> None:
    output = request.output_token_ids
    act.token(request.request_id, len(output), token_id)
    output.append(token_id)
    state.counters.num_generated_tokens += 1
    if request.first_token_s is None:
        request.first_token_s = act.now_s
    request.last_token_s = act.now_s
    outcome = request.stop_rules.ending(token_id, len(output))
    if outcome is not None:
        end(state, request, outcome, act)


def _take_ignored_row(request: RequestState, row: Row, result: RowResult) -> None:
    """Nothing is shown or counted, but KV of tokens we know is good for the cache."""
    if result.error is not None:
        request.kv_is_suspect = True
    else:
        request.num_computed = min(row.start + row.num_tokens, request.num_tokens)


def _fail_row(
    state: SchedulerState, request: RequestState, row: Row, result: RowResult, act: Activation
) -> None:
    request.kv_is_suspect = True
    reason = result.error or f"the worker gave {len(result.token_ids)} tokens where one was due"
    position = row.start + row.num_tokens
    end(
        state,
        request,
        Failed(status=500, message=f"Computing token {position} failed: {reason}", code="computation_failed"),
        act,
    )
