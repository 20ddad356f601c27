"""Watches who waits and who runs, from what the scheduler hears and says: nobody waits for nothing."""

from __future__ import annotations

from collections.abc import Sequence

from ksana.cache.cache_config import ceil_div
from ksana.messages.base import Message, RequestId
from ksana.messages.blocks import BlocksPlanned, PlanBlocks
from ksana.messages.outputs import StepOutputs
from ksana.messages.remote import CancelLoad, LoadPrefix, PrefixLoaded
from ksana.messages.requests import AddRequest
from ksana.messages.steps import StepPlan, WorkerLost, WorkerReady
from ksana.runtime.actor import Said
from ksana.wiring import Cores
from simulations.checks.promises import BrokenPromise
from simulations.engine import EngineSpec

_PATIENCE = 3
"""Step plans that may pass over a waiting request there is a place for: one was open when it came, and one
when room was made."""
_STEPS_WITHOUT_A_DECODE = 2
"""Of those planned before its first token came."""
_PATIENCE_WITH_WINDOWS = 12
"""With sliding windows, which give room without a release, the scheduler looks again every eighth plan."""


class QueueWatch:
    """Of one engine, as long as its worker lives: the first in the queue goes first, and as soon as it fits;
    whatever may give room is followed by a question for those who wait."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._waiting: dict[RequestId, AddRequest] = {}
        self._running: set[RequestId] = set()
        self._preempted: set[RequestId] = set()
        self._passed_over: dict[RequestId, int] = {}
        self._decoding: dict[RequestId, int] = {}
        """Running requests that have given tokens, and how many they may still give."""
        self._left_out: dict[RequestId, int] = {}
        self._limits: dict[RequestId, int] = {}
        """Tokens that each may give from when it was let in."""
        self._loading: set[RequestId] = set()
        self._making_way: set[RequestId] = set()
        """Loads cancelled to make room, and not answered yet."""
        self._holders: set[RequestId] = set()
        """They wait with blocks that a load brought."""
        self._is_due = False
        """Something may have given room, and the waiting ones were not asked for since."""
        self._num_preemptions = 0
        self._epoch = 0

    def take(
        self,
        now_s: float,
        messages: Sequence[Message],
        said: Sequence[Said],
        cores: Cores,
        *,
        is_simple: bool,
        is_well: bool,
    ) -> None:
        """One activation of the scheduler. `is_well`: no worker was lost so far, and no step is held back.
        `is_simple`: that, and there is no store."""
        for message in messages:
            if isinstance(message, AddRequest):
                self._waiting[message.request_id] = message
            elif isinstance(message, PrefixLoaded):
                self._loaded(message)
            elif isinstance(message, WorkerLost | WorkerReady):
                self._epoch = message.pool_epoch
                self._is_due = False
                self._running.clear()
                self._decoding.clear()
                self._loading.clear()
                self._making_way.clear()
                self._holders.clear()
            elif isinstance(message, BlocksPlanned):
                self._check_never(message, said)
                if any(refusal.reason == "no_room" for refusal in message.refusals):
                    self._is_due = False
        num_loads = 0
        plan: PlanBlocks | None = None
        for _, message in said:
            if isinstance(message, StepPlan):
                self._admitted(message)
                self._check_decodes(message, messages)
                if is_simple:
                    self._check_first(message, cores)
            elif isinstance(message, PlanBlocks):
                plan = message
                self._check_making_way(message)
                released = {release.request_id for release in message.releases} & self._running
                self._running -= released
                for request_id in released:
                    self._decoding.pop(request_id, None)
                self._preempted |= released
            elif isinstance(message, StepOutputs):
                self._ended(message)
            elif isinstance(message, LoadPrefix):
                num_loads += 1
                self._loading.add(message.request_id)
                if message.request_id in self._running:
                    raise BrokenPromise(f"request {message.request_id} loads, and has its blocks still")
                if len(message.token_ids) <= self._spec.block_size:
                    raise BrokenPromise(f"request {message.request_id} loads, and has no full block to load")
                if message.give_up_at_s > now_s + self._spec.remote_load_timeout_s:
                    raise BrokenPromise(f"request {message.request_id} may load for longer than is allowed")
            elif isinstance(message, CancelLoad):
                self._cancelled(message.request_id, said)
        if plan is not None:
            self._check_asked(plan, is_well=is_well)
        self._check_preemption(cores, num_loads)

    def _loaded(self, message: PrefixLoaded) -> None:
        was_cancelled = message.request_id in self._making_way
        self._making_way.discard(message.request_id)
        if message.request_id in self._loading and message.holds_blocks and not was_cancelled:
            self._holders.add(message.request_id)
        self._is_due = self._is_due or message.request_id in self._loading
        self._loading.discard(message.request_id)

    def _cancelled(self, request_id: RequestId, said: Sequence[Said]) -> None:
        """A load was told to end: to make way, unless its request has ended or the answer crossed with it."""
        outputs = [message for _, message in said if isinstance(message, StepOutputs)]
        is_ended = any(ended.request_id == request_id for message in outputs for ended in message.ended)
        if request_id in self._loading and not is_ended:
            self._making_way.add(request_id)

    def _check_making_way(self, plan: PlanBlocks) -> None:
        """One gives way at a time: while a load that was told to has not ended, nobody else loses what it
        holds."""
        released = {release.request_id for release in plan.releases} & self._holders
        self._holders -= released
        if released and self._making_way:
            raise BrokenPromise(
                f"waiting requests {sorted(released)} lost their blocks while loads of "
                f"{sorted(self._making_way)} were giving way"
            )

    def _admitted(self, plan: StepPlan) -> None:
        for new in plan.new:
            self._waiting.pop(new.request_id, None)
            self._passed_over.pop(new.request_id, None)
            self._decoding.pop(new.request_id, None)
            self._limits[new.request_id] = (
                (new.sampling.max_tokens or 0) + new.prompt_len - len(new.token_ids)
            )
            self._preempted.discard(new.request_id)
            self._holders.discard(new.request_id)
            self._running.add(new.request_id)

    def _ended(self, outputs: StepOutputs) -> None:
        for tokens in outputs.tokens:
            if tokens.request_id in self._running:
                left = self._decoding.get(tokens.request_id, self._limits[tokens.request_id])
                self._decoding[tokens.request_id] = left - len(tokens.token_ids)
        for ended in outputs.ended:
            self._waiting.pop(ended.request_id, None)
            self._passed_over.pop(ended.request_id, None)
            self._running.discard(ended.request_id)
            self._decoding.pop(ended.request_id, None)
            self._limits.pop(ended.request_id, None)
            self._left_out.pop(ended.request_id, None)
            self._holders.discard(ended.request_id)
            self._making_way.discard(ended.request_id)
            self._preempted.discard(ended.request_id)

    def _check_decodes(self, plan: StepPlan, messages: Sequence[Message]) -> None:
        """Every running decode has a place in every step, but where blocks are missing."""
        named = {row.request_id for row in plan.rows}
        refused = {
            refusal.request_id
            for message in messages
            if isinstance(message, BlocksPlanned)
            for refusal in message.refusals
        }
        for request_id, num_left in self._decoding.items():
            if request_id in named or request_id in refused or num_left <= 2:
                self._left_out[request_id] = 0
                continue
            missed = self._left_out[request_id] = self._left_out.get(request_id, 0) + 1
            if missed > _STEPS_WITHOUT_A_DECODE:
                raise BrokenPromise(f"{missed} steps up to {plan.step_id} left out request {request_id}")

    def _check_first(self, plan: StepPlan, cores: Cores) -> None:
        if not self._waiting:
            return
        first = min(self._waiting)
        if any(new.request_id > first for new in plan.new):
            raise BrokenPromise(f"step {plan.step_id}: requests were let in before request {first}")
        if self._preempted and min(self._preempted) < first:
            return
        num_tokens = sum([row.num_tokens for row in plan.rows])
        spec = self._spec
        if num_tokens >= spec.max_num_batched_tokens:
            return
        if len(self._running) >= min(spec.max_num_seqs, spec.max_num_batched_tokens):
            return
        if not self._fits(self._waiting[first], cores):
            self._passed_over[first] = 0
            return
        passed = self._passed_over[first] = self._passed_over.get(first, 0) + 1
        limit = _PATIENCE if spec.sliding_window is None else _PATIENCE_WITH_WINDOWS
        if passed > limit:
            raise BrokenPromise(f"request {first} fits, but {passed} steps were planned without it")

    def _fits(self, request: AddRequest, cores: Cores) -> bool:
        """Whether its prompt and one block more could be had, whatever of it is cached."""
        size, num_prompt = self._spec.block_size, len(request.prompt_token_ids)
        own = num_prompt + min(size, (request.sampling.max_tokens or size + 1) - 1)
        num_blocks = ceil_div(own, size)
        fa = cores.allocator.fa
        if num_blocks > fa.pool.num_free + fa.pool.num_cached - fa.num_set_aside:
            return False
        if cores.manager is None:
            return True
        swa = cores.manager
        peak = swa.config.num_swa_peak(num_blocks, min(self._spec.max_num_batched_tokens, num_prompt))
        return peak <= swa.cache.room - swa.tables.num_set_aside

    def _check_asked(self, plan: PlanBlocks, *, is_well: bool) -> None:
        """When blocks are given back, or a request is back from its load, the next plan with a place in it
        asks for one that waits."""
        if any(demand.new is not None for demand in plan.demands):
            self._is_due = False
            return
        self._is_due = self._is_due or bool(plan.releases)
        spec, waiting = self._spec, (self._waiting.keys() | self._preempted) - self._loading
        if not (self._is_due and waiting and is_well):
            return
        num_tokens = sum([demand.num_tokens for demand in plan.demands])
        num_places = min(spec.max_num_seqs, spec.max_num_batched_tokens) - len(self._running)
        if num_places > 0 and num_tokens < spec.max_num_batched_tokens:
            raise BrokenPromise(
                f"step {plan.step_id} has a place, there may be room again, and none of {sorted(waiting)} is "
                "asked for"
            )

    def _check_never(self, answer: BlocksPlanned, said: Sequence[Said]) -> None:
        """A request that fits no pool is told at once."""
        ended = {
            one.request_id for _, message in said if isinstance(message, StepOutputs) for one in message.ended
        }
        for refusal in answer.refusals:
            is_here = refusal.request_id in self._waiting and answer.pool_epoch == self._epoch
            if refusal.reason == "never" and is_here and refusal.request_id not in ended:
                raise BrokenPromise(f"request {refusal.request_id} can never run, and still waits")

    def _check_preemption(self, cores: Cores, num_loads: int) -> None:
        """Nobody who runs makes way while others only load."""
        status = cores.scheduler.status()
        before, self._num_preemptions = self._num_preemptions, status.counters.num_preemptions
        if self._num_preemptions > before and status.num_loading > num_loads:
            raise BrokenPromise(
                f"a running request was preempted, while {status.num_loading - num_loads} were being loaded"
            )
