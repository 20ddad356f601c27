"""The performance backend: a producer like the gateway; its requests come from a file and measure the engine.

Receives  `InferBatchReady` and `StepOutputs` from the scheduler, in the tokenizer's stead: it speaks ids.
Sends     `AddInferRequest`, `RunInferRound` and `Abort` to the scheduler.
Owns      the batches, the rounds still to be run, the samples.
Never     runs two batches at once; asks for more rounds than may be in the executor.
If it fails  the measurement ends with its exception. If an actor fails, the batch does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import trio

from ksana.errors import InvariantViolated
from ksana.messages.base import Message, RequestId
from ksana.messages.outputs import Failed, StepOutputs
from ksana.messages.perf import AddInferRequest, InferBatchReady, RunInferRound
from ksana.messages.requests import Abort
from ksana.messages.status import EngineStatus
from ksana.perf.batches import Batch
from ksana.perf.inputs import fill_seed, infer_requests
from ksana.perf.result import BatchResult, OperatorSample, summarize
from ksana.perf.rounds import MeasuredRound, RoundTimer, TimedScheduler
from ksana.runtime.clock import now_s
from ksana.scheduling.fixed_batch import FixedBatchPolicy
from ksana.scheduling.scheduler import Scheduler
from ksana.scheduling.settings import SchedulerSettings

log = logging.getLogger(__name__)

WATCH_EVERY_S = 0.5
"""How often it is looked whether an actor broke: then nobody answers."""

MIN_STAT = 2

OnRound = Callable[[int, str, int], None]
"""Told of each round done: number and name of the batch, and how many of its rounds are done."""


class EnginePort(Protocol):
    """What the backend needs of the engine it measures."""

    def tell_scheduler(self, message: Message) -> None: ...

    def status(self) -> EngineStatus: ...


class Rounds(msgspec.Struct, frozen=True, kw_only=True):
    """How many of each kind a batch runs, in this order."""

    warmup: int = 2
    stat: int = 10
    operator: int = 3
    """With operators timed, which slows them down: they count for nothing else."""
    enough_s: float | None = None
    """A batch that has run so long needs no more than its warmup and `MIN_STAT` rounds: where each round is
    long, few tell as much. None: all are run, however long they take."""

    @property
    def total(self) -> int:
        return self.warmup + self.stat + self.operator


class _BatchRun:
    """The batch that is being measured."""

    def __init__(self, number: int, batch: Batch, request_ids: Sequence[RequestId]) -> None:
        self.number = number
        self.batch = batch
        self.not_ended = set(request_ids)
        self.ready: InferBatchReady | None = None
        self.began_s = 0.0
        """When its first round was ordered."""
        self.num_asked = 0
        self.done: list[MeasuredRound] = []
        self.error: str | None = None
        self.over = trio.Event()

    def fail(self, why: str) -> None:
        """The first reason is the one that counts."""
        if self.error is None:
            self.error = why


class ModelPerfBackend:
    """`make_scheduler` and `take_outputs` are for the engine that is to be measured; then `start_perf`."""

    def __init__(
        self,
        batches: Sequence[Batch],
        *,
        rounds: Rounds,
        seed: int,
        vocab_size: int,
        on_round: OnRound | None = None,
    ) -> None:
        self._batches = batches
        self._rounds = rounds
        self._seed = seed
        self._vocab_size = vocab_size
        self._on_round = on_round
        self._timer = RoundTimer()
        self._max_in_flight = 1
        self._engine: EnginePort | None = None
        self._run: _BatchRun | None = None
        self._next_id: RequestId = 1

    def make_scheduler(self, settings: SchedulerSettings) -> Scheduler:
        """The real scheduler with the policy of a fixed batch, and a clock around it."""
        self._timer.forget()
        self._max_in_flight = settings.max_steps
        return TimedScheduler(settings, FixedBatchPolicy(), self._timer)

    async def start_perf(self, engine: EnginePort, *, until_s: float | None = None) -> list[BatchResult]:
        """Measure one batch after the other; returns when all are complete, a result for each.

        Batches that have not begun at `until_s` (clock time) are left out.
        """
        self._engine = engine
        results = []
        for number, batch in enumerate(self._batches):
            if until_s is not None and now_s() >= until_s:
                break
            requests = infer_requests(
                batch, number, seed=self._seed, vocab_size=self._vocab_size, first_id=self._next_id
            )
            self._next_id += len(requests)
            self._timer.forget()
            self._run = run = _BatchRun(number, batch, [request.request_id for request in requests])
            engine.tell_scheduler(AddInferRequest(requests=requests, fill_seed=fill_seed(self._seed, number)))
            await self.batch_waiter()
            self._run = None
            if run.error is not None:
                log.error("batch %r failed: %s", batch.name, run.error)
            results.append(self._result(run))
        return results

    def schedule(self) -> None:
        """Order the next rounds, as many as may be on their way; after the last the requests are aborted."""
        run = self._run
        assert run is not None
        rounds = self._rounds
        total = rounds.total
        if rounds.enough_s is not None and len(run.done) >= rounds.warmup + MIN_STAT:
            total = run.num_asked if now_s() - run.began_s >= rounds.enough_s else total
        while run.num_asked < min(total, len(run.done) + self._max_in_flight):
            trace_operators = run.num_asked >= rounds.warmup + rounds.stat
            run.num_asked += 1
            self._tell(
                RunInferRound(num_layer_rounds=run.batch.layer_forward_round, trace_operators=trace_operators)
            )
        if len(run.done) == total:
            self._abort(run)

    def take_outputs(self, message: Message) -> None:
        """Called in the scheduler's task; answers at once, so that no round waits for this task."""
        run = self._run
        if run is None:
            return  # what a batch that was given up still says
        if isinstance(message, InferBatchReady):
            run.ready, run.began_s = message, now_s()
            self.schedule()
        elif isinstance(message, StepOutputs):
            self._take_endings(run, message)
            if message.tokens and run.error is None and self.update_with_generation_result(message):
                self.schedule()
        else:
            raise InvariantViolated(f"the performance backend was told a {type(message).__name__}")

    def update_with_generation_result(self, outputs: StepOutputs) -> bool:
        """A round is done: note its metrics. False if it was none, which ends the batch."""
        run = self._run
        assert run is not None
        if len(outputs.tokens) != len(run.batch.requests) or not self._timer.rounds:
            run.fail(f"a round gave {len(outputs.tokens)} tokens for {len(run.batch.requests)} requests")
            self._abort(run)
            return False
        run.done.append(self._timer.rounds.popleft())
        if self._on_round is not None:
            self._on_round(run.number, run.batch.name, len(run.done))
        return True

    async def batch_waiter(self) -> None:
        """Wait until every request of the batch has ended, or an actor broke."""
        run, engine = self._run, self._engine
        assert run is not None
        assert engine is not None
        num_crashes = engine.status().num_core_crashes
        while not run.over.is_set():
            with trio.move_on_after(WATCH_EVERY_S):
                await run.over.wait()
            status = engine.status()
            if status.num_core_crashes != num_crashes or status.broken:
                run.fail("an actor of the engine broke; the log tells more")
                return

    def _take_endings(self, run: _BatchRun, outputs: StepOutputs) -> None:
        for ended in outputs.ended:
            run.not_ended.discard(ended.request_id)
            if isinstance(ended.outcome, Failed):
                run.fail(ended.outcome.message)
        if not run.not_ended:
            run.over.set()

    def _abort(self, run: _BatchRun) -> None:
        for request_id in sorted(run.not_ended):
            self._tell(Abort(request_id=request_id))

    def _tell(self, message: Message) -> None:
        assert self._engine is not None
        self._engine.tell_scheduler(message)

    def _result(self, run: _BatchRun) -> BatchResult:
        shape, rounds, batch = run.batch.shape(), self._rounds, run.batch
        if run.ready is not None:
            swa_use = run.ready.swa_use
            shape = msgspec.structs.replace(
                shape,
                num_fa_blocks=run.ready.fa_use.num_referenced,
                num_swa_blocks=swa_use.num_referenced if swa_use is not None else 0,
            )
        measured = run.done[rounds.warmup :] if run.error is None else []
        samples = tuple(
            msgspec.structs.replace(one.sample, forward_ns=one.sample.forward_ns // one.num_layer_rounds)
            for one in measured
            if not one.trace_operators
        )
        return BatchResult(
            name=batch.name,
            shape=shape,
            warmup_rounds=rounds.warmup,
            stat_rounds=rounds.stat if run.error is not None else len(samples),
            layer_forward_round=batch.layer_forward_round,
            rounds=samples,
            operator_rounds=tuple(_operators(one) for one in measured if one.trace_operators),
            summary=summarize(samples),
            error=run.error,
        )


def _operators(one: MeasuredRound) -> dict[str, OperatorSample]:
    return {
        operator.name: OperatorSample(total_ns=operator.total_ns, calls=operator.num_calls)
        for operator in one.operators
    }
