"""A policy that runs one fixed step again and again, each time from the same state, to measure it.

A batch comes as `AddInferRequest`: requests of S known tokens, of which a round computes the last F.

1. *Walk.* Blocks for the first S - F tokens of each request are taken chunk by chunk, as a prefill would, so
   that prefixes join the tree and sliding windows move on. The worker fills these blocks with made-up KV.
   A last dry step takes the blocks of the round itself. Then `InferBatchReady` is said.
2. *Rounds.* Each `RunInferRound` makes one step of the rows [S - F, S). Its results are taken like any others
   and then taken back: nothing is known of the sampled token, nothing is reported to the block allocator,
   blocks stay. So every plan of a batch is the same but for its number.
3. *End.* The producer aborts the requests. When one ends in another way, the others fail with it.
"""

from __future__ import annotations

from collections import deque

import msgspec

from ksana.errors import InvariantViolated
from ksana.messages.base import Message
from ksana.messages.blocks import PlanBlocks
from ksana.messages.outputs import Failed
from ksana.messages.perf import AddInferRequest, InferBatchReady, RunInferRound
from ksana.messages.steps import Rehearsal, StepPlan, WorkerLost
from ksana.scheduling.activation import Activation
from ksana.scheduling.fixed_batch_steps import (
    Batch,
    Member,
    ask,
    request_state,
    roll_back,
    round_demands,
    walk_demands,
)
from ksana.scheduling.lifecycle import end, retire_leaving
from ksana.scheduling.planner import make_plan
from ksana.scheduling.settings import SchedulerSettings
from ksana.scheduling.state import SchedulerState


class FixedBatchPolicy:
    """One batch at a time; see the module. Cost: O(requests) per activation, besides the scheduler's own."""

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._rounds: deque[RunInferRound] = deque()
        self._loss = ""

    def receive(
        self,
        state: SchedulerState,
        settings: SchedulerSettings,  # noqa: ARG002
        message: Message,
        act: Activation,
    ) -> bool:
        if isinstance(message, WorkerLost):
            self._loss = message.reason
            return False
        if isinstance(message, AddInferRequest):
            self._add(state, message, act)
        elif isinstance(message, RunInferRound):
            if self._batch is not None:  # else it has ended while the message was on its way
                self._rounds.append(message)
        else:
            return False
        return True

    def plan(self, state: SchedulerState, settings: SchedulerSettings, act: Activation) -> PlanBlocks | None:
        batch = self._batch
        if batch is not None:
            self._mark_step(state, batch, act)
            trouble = _trouble(state, batch, self._loss)
            if trouble is not None:
                self._end(state, settings, batch, trouble, act)
                batch = None
        if batch is None:
            return make_plan(state, settings)  # gives back the blocks of the batch before
        if batch.stage != "walk":
            roll_back(state, batch)
        if _is_last_dry_step_over(state, batch):
            batch.stage = "rounds"
            assert state.fa_use is not None
            act.said.append(("tokenizer", InferBatchReady(fa_use=state.fa_use, swa_use=state.swa_use)))
        if state.plan is not None or state.worker != "ready":
            return None
        return self._next_plan(state, settings, batch)

    # The batch

    def _add(self, state: SchedulerState, message: AddInferRequest, act: Activation) -> None:
        if self._batch is not None and any(state.alive(m.request_id) for m in self._batch.members):
            raise InvariantViolated("a batch was added while the one before it still runs")
        self._rounds.clear()
        self._batch = Batch(
            members=[
                Member(
                    request_id=request.request_id,
                    start=len(request.token_ids) - request.forwarding_token_num,
                    end=len(request.token_ids),
                )
                for request in message.requests
            ],
            fill=Rehearsal(fill_seed=message.fill_seed),
        )
        for request in message.requests:
            added = request_state(request, act.now_s)
            state.requests[added.request_id] = added
            state.to_waiting(added)
        if state.worker == "lost":
            for member in self._batch.members:
                outcome = Failed(status=503, message=state.refusal, code="worker_lost")
                end(state, state.requests[member.request_id], outcome, act)

    def _end(
        self, state: SchedulerState, settings: SchedulerSettings, batch: Batch, why: str, act: Activation
    ) -> None:
        for member in batch.members:
            request = state.alive(member.request_id)
            if request is not None:
                end(state, request, Failed(status=500, message=why, code="batch_failed"), act)
        self._batch = None
        self._rounds.clear()
        if batch.stage == "rounds":
            state.updates = []  # of tokens that were rolled back
        retire_leaving(state, settings)

    # Steps

    def _mark_step(self, state: SchedulerState, batch: Batch, act: Activation) -> None:
        """Write into the step plan that is about to be said how it is to be run."""
        for index, (address, message) in enumerate(act.said):
            if not isinstance(message, StepPlan) or batch.planned is None:
                continue
            rows = message.rows
            if batch.planned.fill_seed is not None:
                rows = tuple([msgspec.structs.replace(row, sample=False) for row in rows])
                state.steps[-1].rows = rows
            plan = msgspec.structs.replace(message, rows=rows, rehearsal=batch.planned)
            act.said[index] = (address, plan)
            batch.planned = None
            batch.num_rows = len(rows)

    def _next_plan(
        self, state: SchedulerState, settings: SchedulerSettings, batch: Batch
    ) -> PlanBlocks | None:
        if batch.stage == "rounds":
            if not self._rounds or len(state.steps) >= settings.max_steps:
                return None
            order = self._rounds.popleft()
            batch.planned = Rehearsal(
                num_layer_rounds=order.num_layer_rounds, trace_operators=order.trace_operators
            )
            return ask(state, settings, round_demands(state, batch))
        if state.steps:
            return None  # walking is not measured, so nothing is planned ahead
        batch.planned = batch.fill
        demands = walk_demands(state, settings, batch)
        if demands:
            return ask(state, settings, demands)
        batch.stage = "last_dry_step"
        plan = ask(state, settings, round_demands(state, batch))
        for member in batch.members:
            member.num_reported_computed = state.requests[member.request_id].num_reported_computed
        return plan


def _is_last_dry_step_over(state: SchedulerState, batch: Batch) -> bool:
    return batch.stage == "last_dry_step" and not state.steps and state.plan is None


def _trouble(state: SchedulerState, batch: Batch, loss: str) -> str | None:
    """Why the batch cannot go on, or None. Empty when its requests have simply been aborted."""
    requests = [state.alive(member.request_id) for member in batch.members]
    if not any(requests):
        return ""
    if batch.epoch is None and state.worker == "ready":
        batch.epoch = state.pool_epoch
    if batch.epoch is not None and (state.worker != "ready" or state.pool_epoch != batch.epoch):
        return f"the worker was lost: {loss}"
    if any(request is None for request in requests):
        return "another request of the batch failed"
    is_short = _is_last_dry_step_over(state, batch) and batch.num_rows < len(batch.members)
    if is_short or any(request is not None and request.num_preemptions for request in requests):
        return "the KV pools have no room for all requests of the batch"
    return None
