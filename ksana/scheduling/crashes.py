"""The worker was lost or is back. Whom to blame is decided in `ksana.scheduling.suspects`."""

from __future__ import annotations

from ksana.messages.base import RequestId
from ksana.messages.blocks import PoolUse, ResetPools
from ksana.messages.outputs import Failed
from ksana.messages.steps import WorkerLost, WorkerReady
from ksana.scheduling.activation import Activation
from ksana.scheduling.lifecycle import end, forget_run, step_aside
from ksana.scheduling.settings import SchedulerSettings
from ksana.scheduling.state import SchedulerState


def worker_lost(state: SchedulerState, message: WorkerLost, act: Activation) -> None:
    """Everything running or loading waits again, to be computed from its tokens; what was in flight is
    suspect.

    When the executor has given up, every request fails with a 503 instead.
    """
    if message.pool_epoch < state.pool_epoch:
        state.counters.num_late_messages += 1
        return
    if state.worker == "ready":
        state.counters.num_worker_losses += 1
        _return_to_waiting(state, message.reason, act)
    if message.restarting:
        state.worker = "restarting"
        return
    state.worker = "lost"
    state.refusal = f"The model worker was lost and could not be restarted: {message.reason}"
    fail_all(state, Failed(status=503, message=state.refusal, code="worker_lost"), act)


def worker_ready(
    state: SchedulerState, settings: SchedulerSettings, message: WorkerReady, act: Activation
) -> None:
    """A worker with empty pools: the allocator empties its own, and planning begins."""
    if message.pool_epoch <= state.pool_epoch:
        state.counters.num_late_messages += 1
        return
    if state.worker == "ready":  # the loss of the former one was not told
        state.counters.num_worker_losses += 1
        _return_to_waiting(state, "the worker was replaced", act)
    state.worker = "ready"
    state.pool_epoch = message.pool_epoch
    state.last_progress_s = act.now_s
    state.fa_use, state.swa_use = _emptied(state.fa_use), _emptied(state.swa_use)
    act.said.append(("block_allocator", ResetPools(pool_epoch=message.pool_epoch)))
    if settings.max_remote_loads:
        act.said.append(("remote_cache_loader", ResetPools(pool_epoch=message.pool_epoch)))


def _emptied(use: PoolUse | None) -> PoolUse | None:
    if use is None:
        return None
    num_blocks = use.num_blocks
    return PoolUse(num_blocks=num_blocks, num_free=num_blocks, num_cached=0, num_referenced=0, num_deferred=0)


def fail_all(state: SchedulerState, outcome: Failed, act: Activation) -> None:
    """End every request, in the order of arrival."""
    for request_id in sorted(state.requests):
        request = state.alive(request_id)
        if request is not None:
            end(state, request, outcome, act)


def _return_to_waiting(state: SchedulerState, reason: str, act: Activation) -> None:
    recalled = act.recall_steps()
    state.steps = [step for step in state.steps if step.step_id not in recalled]
    suspects, ended_in_flight = _note_suspects(state)
    state.plan = None
    state.steps = []
    state.num_changes += 1
    state.plans_to_skip = 0
    state.short_of_room = state.retry_at_s = None
    state.updates, state.releases, state.drops, state.edits, state.copies = [], [], [], [], []
    state.running, state.loading, state.leaving = [], [], []
    for request in list(state.requests.values()):
        forget_run(request)
        request.load_not_before = 0  # what the local cache had is gone
        if request.phase == "ended":
            del state.requests[request.request_id]
        else:
            request.phase = "waiting"
    state.waiting = sorted(state.requests)

    culprit = state.requests[suspects[0]] if len(suspects) == 1 and not ended_in_flight else None
    if culprit is not None and culprit.num_crashes >= 2:
        message = f"The model worker was lost twice while computing this request: {reason}"
        end(state, culprit, Failed(status=500, message=message, code="worker_lost"), act)
    else:
        state.trials.split(suspects)


def _note_suspects(state: SchedulerState) -> tuple[list[RequestId], bool]:
    """Mark the requests in flight with how far they must come to be cleared. Also: whether steps in flight
    named requests already ended, which may be the cause as well."""
    suspects: dict[RequestId, None] = {}
    ended_in_flight = False
    for step in state.steps:
        for row in step.rows:
            request = state.requests[row.request_id]
            if request.phase == "ended":
                ended_in_flight = True
                continue
            suspects[row.request_id] = None
            request.clear_at = max(request.clear_at, row.start + row.num_tokens)
    for request_id in suspects:
        state.requests[request_id].num_crashes += 1
    return sorted(suspects), ended_in_flight


def settle_trials(state: SchedulerState) -> None:
    """Clear suspects that came past where the crash was; when a whole group did, try the next one alone."""
    cleared = []
    for group in state.trials.groups:
        for request_id in group:
            request = state.alive(request_id)
            if request is None:
                cleared.append(request_id)
            elif request.num_computed >= request.clear_at:
                request.num_crashes = request.clear_at = 0
                cleared.append(request_id)
    if state.trials.forget(cleared) and state.trials.active:
        for request_id in list(state.running):
            step_aside(state, state.requests[request_id])
