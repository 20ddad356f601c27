"""What must hold of every answer and of every engine, whatever goes wrong around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from ksana.messages.blocks import CacheCounters
from ksana.messages.outputs import Aborted, Failed, Finished, RequestEnded
from ksana.scheduling.status import SchedulerCounters
from simulations.checks.oracles import PrefixOracle, StoreOracle, is_roomy, most_crashes
from simulations.checks.promises import BrokenPromise
from simulations.engine import EngineSpec
from simulations.faults import WorkerFaults
from simulations.script import EOS_ID

if TYPE_CHECKING:
    from simulations.frontend import Asked

_MANY = 5
_SHARE_LOADED = 0.9
PATIENT_S = 1e5
"""A client with a timeout of this or more waits for ever: that it runs out means that something hung."""


class EngineFacts:
    """What is known of an engine that explains how its requests end."""

    def __init__(self, spec: EngineSpec, worker_faults: WorkerFaults) -> None:
        self.spec = spec
        self.worker_faults = worker_faults
        self.is_drained = False
        self.num_losses = 0
        """Workers lost so far."""
        self.num_first_suspects = 0
        """Requests in flight when the first one was lost."""
        self.gave_up = False
        """The executor has said so, at least once."""
        self.slowest_message_s = 0.0
        """By how much messages may be late."""
        self.num_crashes = 0
        """Workers killed from outside so far, or that did not start."""
        self.oracle: PrefixOracle | None = None
        """Only where answers are checked closely."""
        self.store_oracle: StoreOracle | None = None
        self.stored: Mapping[bytes, bytes] = {}
        """What lies in the store, by key."""
        self.has_store = False
        self.num_poisons = 0
        self.is_calm = True
        """No fault was planned for it."""
        self.endings: list[Accounted] = []


class Accounted(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request in the books of the front end, kept where answers are checked closely."""

    index: int
    outcome: str
    """Finished, Failed or Aborted."""
    was_left: bool
    num_tokens_at_most: int
    """Prompt and longest answer."""
    num_computed: int
    """Tokens that had to be computed, without what the cache had; those sampled last need not be."""
    num_cached: int
    num_cached_expected: int
    num_stored: int
    """Prompt tokens that the store had when it was asked."""
    ran: bool


def check_ending(asked: Asked, ended: RequestEnded, now_s: float, facts: EngineFacts) -> None:
    """Raises BrokenPromise unless the ending is one that the request and what happened around it explain."""
    usage, num_prompt = ended.usage, asked.request.prompt.num_tokens
    if usage.num_prompt_tokens != num_prompt:
        raise BrokenPromise(f"{_name(asked)}: usage says {usage.num_prompt_tokens} prompt tokens")
    if not 0 <= usage.num_cached_tokens < num_prompt or usage.num_cached_tokens % facts.spec.block_size:
        raise BrokenPromise(f"{_name(asked)}: {usage.num_cached_tokens} of its prompt tokens were cached")
    if usage.num_cached_tokens and not facts.spec.enable_prefix_caching:
        raise BrokenPromise(f"{_name(asked)}: cached tokens, without prefix caching")
    came_first = asked.stopped_at is not None and not _is_stop_string(ended)
    if not (asked.left or came_first) and usage.num_output_tokens != len(asked.output_ids):
        raise BrokenPromise(
            f"{_name(asked)}: usage says {usage.num_output_tokens} tokens, {len(asked.output_ids)} came"
        )
    wrong = _what_is_wrong(asked, ended, now_s, facts)
    if wrong is not None:
        raise BrokenPromise(f"{_name(asked)} ended in {ended.outcome}: {wrong}")
    _check_timing(asked, ended, now_s)


def _is_stop_string(ended: RequestEnded) -> bool:
    return isinstance(ended.outcome, Finished) and isinstance(ended.outcome.stop_reason, str)


def _what_is_wrong(asked: Asked, ended: RequestEnded, now_s: float, facts: EngineFacts) -> str | None:
    outcome, count = ended.outcome, ended.usage.num_output_tokens
    limit = min(asked.request.max_tokens, facts.spec.max_model_len - asked.request.prompt.num_tokens)
    if isinstance(outcome, Finished):
        return _wrong_finish(asked, outcome, count, limit)
    if isinstance(outcome, Aborted):
        return None if asked.left else "nobody left"
    return _wrong_failure(asked, outcome, count, now_s, facts)


def _wrong_finish(asked: Asked, outcome: Finished, count: int, limit: int) -> str | None:
    last = asked.script.token(count - 1) if count else None
    stop_id = asked.request.stop_token_id
    ends = set() if asked.request.ignore_eos else {EOS_ID}
    if stop_id is not None:
        ends.add(stop_id)
    if isinstance(outcome.stop_reason, str):
        if asked.stopped_at is None and not asked.left:
            return "no stop string was found"
        expected = None if asked.stopped_at is None else asked.stopped_at + 1
        return None if asked.left or count == expected else f"{count} tokens count, not {expected}"
    if count < 1 or count > limit:
        return f"{count} tokens, {limit} allowed"
    if count < asked.request.min_tokens:
        return f"{count} tokens, at least {asked.request.min_tokens} were wanted"
    if outcome.reason == "stop":
        expected = None if last == EOS_ID else last
        return None if last in ends and outcome.stop_reason == expected else "nothing stopped it there"
    return None if count == limit and last not in ends else f"{count} tokens of {limit}, the last is {last}"


def _wrong_failure(asked: Asked, outcome: Failed, count: int, now_s: float, facts: EngineFacts) -> str | None:
    spec, num_prompt = facts.spec, asked.request.prompt.num_tokens
    if outcome.status == 504:
        if asked.request.timeout_s >= PATIENT_S:
            return "it had all the time in the world: something hung"
        if now_s < asked.deadline_s:
            return f"{asked.deadline_s - now_s:.6f} s early"
        late_s = now_s - asked.deadline_s
        return None if late_s <= facts.slowest_message_s + 1e-6 else f"{late_s:.6f} s late"
    if outcome.status == 503:
        return None if facts.is_drained or facts.gave_up else "the engine was well"
    if outcome.code == "computation_failed":
        position = asked.script.error_at
        right = position is not None and (asked.left or position == len(asked.output_ids))
        return None if right else "no such row was planned"
    if outcome.code == "worker_lost":
        if asked.poison_at is not None or (facts.num_crashes and facts.num_losses >= 2):
            return None
        return f"{facts.num_losses} workers were lost, {facts.num_crashes} of them not for a request"
    if num_prompt >= spec.max_model_len:
        return None if outcome.status == 400 else "the status should be 400"
    num_tokens = min(num_prompt + asked.request.max_tokens, spec.max_model_len)
    if num_tokens - 1 <= spec.num_fa_blocks * spec.block_size:
        return "it fits the pool"
    is_right = outcome.status == 400 and not count
    return None if is_right else f"the status should be 400, at once: {count} tokens came"


def _check_timing(asked: Asked, ended: RequestEnded, now_s: float) -> None:
    timing = ended.timing
    if timing is None:
        raise BrokenPromise(f"{_name(asked)} ended without times")
    times = [
        timing.arrival_s,
        timing.first_scheduled_s,
        timing.first_token_s,
        timing.last_token_s,
        now_s,
    ]
    known = [time for time in times if time is not None]
    if known != sorted(known):
        raise BrokenPromise(f"{_name(asked)}: times out of order: {timing}")
    if (timing.first_token_s is None) != (not asked.output_ids) and not asked.left:
        raise BrokenPromise(f"{_name(asked)}: {len(asked.output_ids)} tokens, but {timing}")


def _name(asked: Asked) -> str:
    return f"request {asked.request_id} (number {asked.record.index})"


def account(asked: Asked, ended: RequestEnded, now_s: float, facts: EngineFacts) -> None:
    """Enter an ending into the books."""
    if facts.oracle is None:
        return
    usage, request, timing = ended.usage, asked.request, ended.timing
    ran = timing is not None and timing.first_scheduled_s is not None
    facts.endings.append(
        Accounted(
            index=asked.record.index,
            outcome=type(ended.outcome).__name__,
            was_left=asked.left,
            num_tokens_at_most=usage.num_prompt_tokens + request.max_tokens,
            num_computed=usage.num_prompt_tokens - usage.num_cached_tokens + usage.num_output_tokens,
            num_cached=usage.num_cached_tokens,
            num_cached_expected=asked.num_cached_expected,
            num_stored=asked.num_stored,
            ran=ran,
        )
    )
    if isinstance(ended.outcome, Finished) and not asked.left and asked.script.prompt_ids is not None:
        token_ids = asked.script.prompt_ids + tuple(asked.output_ids)
        facts.oracle.finished(now_s, request.cache_salt, token_ids[:-1])


def check_books(facts: EngineFacts, counters: SchedulerCounters, cache: CacheCounters | None) -> None:
    """At the end: what the scheduler counted is what came; and where there was room for all, nobody was
    preempted, nothing was evicted, computed twice, or computed though it was there."""
    _check_counters(facts, counters)
    if facts.num_poisons == 1 and not facts.num_crashes:
        allowed = most_crashes(facts.num_first_suspects)
        if facts.num_losses > allowed:
            raise BrokenPromise(f"{facts.num_losses} crashes to find a poisonous request, {allowed} allowed")
    lengths = [ending.num_tokens_at_most for ending in facts.endings]
    if not facts.is_calm or not is_roomy(facts.spec, lengths):
        return
    if facts.has_store:
        _check_shares(facts)
        return
    if counters.num_preemptions:
        raise BrokenPromise(f"{counters.num_preemptions} preemptions, though there was room for all")
    if cache is not None and (cache.num_fa_evictions or cache.num_swa_evictions):
        raise BrokenPromise(f"evictions, though there was room for all: {cache}")
    needed = sum(ending.num_computed for ending in facts.endings if ending.ran)
    most = needed + 2 * sum(ending.ran for ending in facts.endings)
    if counters.num_computed_tokens > most:
        raise BrokenPromise(f"{counters.num_computed_tokens} tokens computed, {most} at most were needed")
    if facts.spec.enable_prefix_caching:
        for ending in facts.endings:
            if ending.ran and ending.num_cached < ending.num_cached_expected:
                raise BrokenPromise(
                    f"number {ending.index}: {ending.num_cached} tokens from the cache, which has "
                    f"{ending.num_cached_expected}"
                )


def _check_shares(facts: EngineFacts) -> None:
    """Where there is room, most of what the store has is loaded rather than computed; when the store's speed
    is not known, or many come at once, not all."""
    ran = [ending for ending in facts.endings if ending.ran and ending.num_stored]
    stored = sum(ending.num_stored for ending in ran)
    cached = sum(min(ending.num_cached, ending.num_stored) for ending in ran)
    if len(ran) >= _MANY and cached < _SHARE_LOADED * stored:
        raise BrokenPromise(
            f"the store had {stored} prompt tokens of {len(ran)} requests; {cached} were used"
        )


def _check_counters(facts: EngineFacts, counters: SchedulerCounters) -> None:
    outcomes = Counter(ending.outcome for ending in facts.endings)
    counted = {
        "Finished": counters.num_stopped + counters.num_length,
        "Failed": counters.num_failed,
        "Aborted": counters.num_aborted,
    }
    for name, number in counted.items():
        if outcomes[name] != number:
            raise BrokenPromise(f"{number} requests are counted as {name}, {outcomes[name]} came")
    if counters.num_added != len(facts.endings):
        raise BrokenPromise(f"{counters.num_added} requests are counted, {len(facts.endings)} were asked")
