"""Loading of prefixes from a remote store, as states of waiting requests.

A request near the head of the queue is *loading* from LoadPrefix until its one PrefixLoaded. It keeps its
place, is not demanded meanwhile, and nobody waits for it. Afterwards it waits again; if it holds confirmed
blocks it is a *holder*, and its next demand goes on from them. A load is tried once, and once more after a
worker restart, which emptied the pools: after a preemption the local cache usually still has what was loaded.
One that was refused for lack of room may be tried again some steps later.

Why everything ends (no hold-and-wait). Only three kinds of requests have blocks: running ones, holders and
loads. (1) A load ends in bounded time, whatever the store does: it has a deadline, and transfers write to
staging memory, so its blocks can be given back at once. (2) Whenever the first refused demand lacks room and
nothing is on its way back already, one holder behind it gives up its blocks, newest first, and after the
last of them one load behind it is cancelled, newest first; a running request has everybody who does not run
behind it. A request that gave up its blocks is plain waiting and never loads again in this epoch, so each
refusal takes one away from a finite number and none comes back. (3) When none is left, running requests are
preempted as ever, and the oldest never is, so it ends. (4) When nothing runs, the head of the queue has the
whole pool but for loads of earlier requests, which end by (1), and blocks held for write-back, which the
store's deadline frees; for these a timer asks again. If it is refused then, it can never run and is failed.
"""

from __future__ import annotations

from bisect import bisect_right

from ksana.messages.base import RequestId
from ksana.messages.remote import CancelLoad, LoadPrefix, PrefixLoaded
from ksana.scheduling.activation import Activation
from ksana.scheduling.request_state import RequestState
from ksana.scheduling.settings import SchedulerSettings, reserved_tokens
from ksana.scheduling.state import SchedulerState

NEVER = 1 << 62
"""For `RequestState.load_not_before`."""
STEPS_BEFORE_RETRY = 16
"""Steps done before a load that found no room is tried again: without a step it would be in vain again."""
RETRY_HELD_AFTER_S = 0.05
"""When to ask again while blocks held for write-back are all that is in the way; nothing tells of them."""
_WORTH_COMPUTING_S = 0.005
"""Prompts that are computed faster than this are not looked up."""


def start_loads(state: SchedulerState, settings: SchedulerSettings, act: Activation) -> None:
    """Ask for the prefixes of requests that will run soon: those there is a place for now and a few more.

    Holders and loads together are at most `max_remote_loads` requests, and their whole need at most half of
    the pool (but for the first). While one waits for room, nobody else starts.
    """
    if not state.waiting or state.worker != "ready" or state.trials.active:
        return
    if state.plans_to_skip and state.running and not state.releases:
        return
    num_soon = settings.max_running - len(state.running) + settings.max_remote_loads
    room = settings.max_remote_loads - state.num_open_loads()
    if room <= 0:
        return
    holders = [i for i in state.waiting if state.requests[i].holds_blocks]
    room -= len(holders)
    pool_tokens = state.fa_use.num_blocks * settings.block_size if state.fa_use is not None else 0
    taken = sum(state.requests[i].num_tokens for i in (*holders, *state.loading))
    for request_id in _candidates(state, num_soon):
        if room <= 0:
            break
        request = state.requests[request_id]
        if not _is_worth_it(state, settings, request):
            continue
        num_reserved = reserved_tokens(request, settings, len(state.running), pool_tokens)
        if taken and pool_tokens and taken + num_reserved > pool_tokens // 2:
            break
        taken += num_reserved
        room -= 1
        _start(state, settings, request, num_reserved, act)


def _candidates(state: SchedulerState, num_soon: int) -> list[RequestId]:
    head = state.alive(state.short_of_room) if state.short_of_room is not None else None
    if head is not None and head.phase == "waiting":
        return [head.request_id]  # what room there is, is its
    return state.waiting[:num_soon]


def _is_worth_it(state: SchedulerState, settings: SchedulerSettings, request: RequestState) -> bool:
    if request.in_plan or request.holds_blocks or state.counters.num_steps < request.load_not_before:
        return False
    if request.num_tokens <= settings.block_size:
        return False  # no full block beside the token that must be computed
    if request.request_id in state.releases:
        return False  # preempted: the allocator has not heard of it yet
    return request.num_tokens >= _WORTH_COMPUTING_S * state.prefill_tokens_per_s


def _start(
    state: SchedulerState,
    settings: SchedulerSettings,
    request: RequestState,
    num_reserved: int,
    act: Activation,
) -> None:
    state.to_loading(request)
    request.is_loading = True
    request.load_not_before = NEVER
    state.num_loads += 1
    load = LoadPrefix(
        pool_epoch=state.pool_epoch,
        request_id=request.request_id,
        token_ids=request.token_ids(),
        cache_salt=request.cache_salt,
        num_reserved_tokens=num_reserved,
        give_up_at_s=min(act.now_s + settings.remote_load_timeout_s, request.deadline_s),
        prefill_tokens_per_s=state.prefill_tokens_per_s,
        resumed=request.num_cached_tokens is not None,
    )
    act.said.append(("remote_cache_loader", load))


def cancel_load(request: RequestState, act: Activation) -> None:
    """Have a load end soon. Its answer is still to come."""
    if request.is_loading and not request.is_load_cancelled:
        request.is_load_cancelled = True
        act.said.append(("remote_cache_loader", CancelLoad(request_id=request.request_id)))


def take_loaded(state: SchedulerState, message: PrefixLoaded, act: Activation) -> None:
    """The request waits again at its place, or, if it ended meanwhile, leaves at last."""
    request = state.requests.get(message.request_id)
    if request is None or not request.is_loading or message.pool_epoch != state.pool_epoch:
        state.counters.num_late_messages += 1
        return
    was_cancelled = request.is_load_cancelled
    request.is_loading = request.is_load_cancelled = False
    request.holds_blocks = message.holds_blocks
    state.load_outcomes[message.outcome] = state.load_outcomes.get(message.outcome, 0) + 1
    state.num_changes += 1
    state.plans_to_skip = 0
    state.last_progress_s = act.now_s
    if request.phase == "ended":
        return
    state.to_waiting(request)
    if message.outcome == "no_room":
        request.load_not_before = state.counters.num_steps + STEPS_BEFORE_RETRY
    if was_cancelled and request.holds_blocks:  # it came before the cancellation did
        _drop_blocks(state, request)


def make_room(state: SchedulerState, behind: RequestId, act: Activation) -> bool:
    """Take back the blocks of one request later than `behind` (see above). False when none has any.

    Also true while a cancelled load has not been answered: its blocks are on their way.
    """
    if state.has_cancelled_load():
        return True
    for request_id in reversed(state.waiting):
        if request_id <= behind:
            break
        request = state.requests[request_id]
        if request.holds_blocks:
            _drop_blocks(state, request)
            return True
    first_later = bisect_right(state.loading, behind)
    if first_later < len(state.loading):
        cancel_load(state.requests[state.loading[-1]], act)
        return True
    return False


def give_up_own(state: SchedulerState, request: RequestState) -> bool:
    """The last resort of a request that finds no room: without the blocks it holds itself."""
    if request.phase != "waiting" or not request.holds_blocks:
        return False
    _drop_blocks(state, request)
    return True


def _drop_blocks(state: SchedulerState, request: RequestState) -> None:
    request.holds_blocks = False
    state.releases.append(request.request_id)
    state.num_changes += 1
