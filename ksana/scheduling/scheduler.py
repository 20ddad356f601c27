"""The scheduler: which requests compute what in the next step, and when a request is over."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import msgspec

from ksana.errors import InvariantViolated
from ksana.messages.base import Message
from ksana.messages.blocks import BlocksPlanned
from ksana.messages.outputs import Aborted, Failed, Finished
from ksana.messages.remote import PrefixLoaded
from ksana.messages.requests import Abort, AddRequest, Drain, StopStringFound
from ksana.messages.steps import StepDone, WorkerLost, WorkerReady
from ksana.scheduling.activation import Activation, Said
from ksana.scheduling.answers import take_answer
from ksana.scheduling.crashes import fail_all, settle_trials, worker_lost, worker_ready
from ksana.scheduling.lifecycle import add, end, has_work, retire_leaving
from ksana.scheduling.planner import make_plan
from ksana.scheduling.policy import Policy
from ksana.scheduling.remote_loads import start_loads, take_loaded
from ksana.scheduling.results import take_results
from ksana.scheduling.settings import SchedulerSettings
from ksana.scheduling.state import SchedulerState
from ksana.scheduling.status import SchedulerStatus


class Scheduler:
    """The core of the scheduler actor: plain code, a deterministic function of its activations.

    Receives: AddRequest, Abort, StopStringFound (tokenizer); BlocksPlanned (block allocator); StepDone,
    WorkerReady, WorkerLost (executor); PrefixLoaded (remote-cache loader); Drain (engine); its timer at the
    earliest deadline.
    Sends: PlanBlocks and ResetPools to the block allocator, StepPlan to the executor, at most one
    StepOutputs per activation to the tokenizer; with a remote cache LoadPrefix, CancelLoad and ResetPools to
    its loader.
    Owns: queues and request states; it alone ends a request, and each exactly once.
    Never: more than one PlanBlocks open; more than two steps in the executor (one without planning ahead);
    blocks given back while a step, plan or load names their request; polling, but while blocks held for
    write-back are all that is in the way.
    If it fails: InvariantViolated comes out of `handle`. The state may be half changed, so the engine must
    not go on with this object.

    Cost: a step of 32 running decodes takes about 0.05 ms, in its two activations together (measured), one of
    64 about 0.1 ms.
    """

    def __init__(self, settings: SchedulerSettings, policy: Policy | None = None) -> None:
        """`policy` decides on the next step instead of the planner; see `ksana.scheduling.policy`."""
        self.settings = settings
        self._policy = policy
        self._state = SchedulerState()

    def handle(self, now_s: float, messages: Sequence[Message]) -> list[Said]:
        """One activation. Messages are taken in order, then deadlines, then the next plan is made."""
        state = self._state
        act = Activation(now_s)
        for message in messages:
            self._receive(message, act)
        self._expire(act)
        if state.trials.active:
            settle_trials(state)
        if state.leaving:
            retire_leaving(state, self.settings)
        if state.retry_at_s is not None and state.retry_at_s <= now_s:
            state.retry_at_s = None
            state.num_changes += 1
        if self.settings.max_remote_loads:
            start_loads(state, self.settings, act)
        if self._policy is None:
            plan = make_plan(state, self.settings)
        else:
            plan = self._policy.plan(state, self.settings, act)

        said = act.said
        if plan is not None:
            said.append(("block_allocator", plan))
        outputs = act.outputs(state.last_step_id)
        if outputs is not None:
            said.append(("tokenizer", outputs))
        return said

    def next_timer_s(self) -> float | None:
        """The earliest deadline, or when to ask again for blocks that are held for write-back."""
        deadline_s, retry_at_s = self._state.next_deadline_s(), self._state.retry_at_s
        if deadline_s is None or retry_at_s is None:
            return deadline_s if retry_at_s is None else retry_at_s
        return min(deadline_s, retry_at_s)

    def status(self) -> SchedulerStatus:
        """Where things stand. Cheap: no loop over requests."""
        state = self._state
        return SchedulerStatus(
            num_running=len(state.running),
            num_waiting=len(state.waiting) + len(state.loading),
            num_loading=len(state.loading),
            num_steps_in_flight=len(state.steps),
            has_work=has_work(state),
            last_progress_s=state.last_progress_s,
            worker=state.worker,
            pool_epoch=state.pool_epoch,
            last_step_id=state.last_step_id,
            draining=state.draining,
            num_suspects=sum(map(len, state.trials.groups)),
            counters=msgspec.structs.replace(state.counters),
            num_loads=state.num_loads,
            load_outcomes=dict(state.load_outcomes),
            prefill_tokens_per_s=state.prefill_tokens_per_s,
            fa_use=state.fa_use,
            swa_use=state.swa_use,
            cache=state.cache,
        )

    def snapshot(self) -> bytes:
        """The whole state as msgpack; a scheduler with equal settings that restores it goes on the same."""
        return msgspec.msgpack.encode(self._state)

    def restore(self, snapshot: bytes) -> None:
        self._state = msgspec.msgpack.decode(snapshot, type=SchedulerState)

    def _receive(self, message: Message, act: Activation) -> None:
        state = self._state
        if self._policy is not None and self._policy.receive(state, self.settings, message, act):
            return
        if isinstance(message, StepDone):
            take_results(state, self.settings, message, act)
        elif isinstance(message, BlocksPlanned):
            take_answer(state, self.settings, message, act)
        elif isinstance(message, AddRequest):
            if message.request_id in state.requests:
                raise InvariantViolated(f"request {message.request_id} was added twice")
            add(state, self.settings, message, act)
        elif isinstance(message, StopStringFound):
            self._stop(message, act)
        elif isinstance(message, Abort):
            self._abort(message, act)
        elif isinstance(message, WorkerLost):
            worker_lost(state, message, act)
        elif isinstance(message, WorkerReady):
            worker_ready(state, self.settings, message, act)
        elif isinstance(message, PrefixLoaded):
            take_loaded(state, message, act)
        elif isinstance(message, Drain):
            state.draining = True
            state.refusal = f"The request was ended because {message.reason}"
            fail_all(state, Failed(status=503, message=state.refusal, code="shutting_down"), act)
        else:
            raise InvariantViolated(f"the scheduler does not understand {type(message).__name__}")

    def _stop(self, message: StopStringFound, act: Activation) -> None:
        request = self._state.alive(message.request_id)
        if request is None:
            self._state.counters.num_late_messages += 1
            return
        num_output_tokens = min(message.token_index + 1, len(request.output_token_ids))
        outcome = Finished(reason="stop", stop_reason=message.stop_string)
        end(self._state, request, outcome, act, num_output_tokens)

    def _abort(self, message: Abort, act: Activation) -> None:
        request = self._state.alive(message.request_id)
        if request is None:
            self._state.counters.num_late_messages += 1
        else:
            end(self._state, request, Aborted(reason="the client left"), act)

    def _expire(self, act: Activation) -> None:
        state = self._state
        while state.deadlines and state.deadlines[0][0] <= act.now_s:
            _, request_id = heapq.heappop(state.deadlines)
            request = state.alive(request_id)
            if request is None:
                continue
            text = (
                f"The request timed out after {act.now_s - request.arrival_time_s:.1f} s "
                f"with {len(request.output_token_ids)} tokens generated"
            )
            end(state, request, Failed(status=504, message=text, code="request_timeout"), act)
