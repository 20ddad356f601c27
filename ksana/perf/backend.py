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

import trio

from ksana.errors import InvariantViolated
from ksana.messages.base import Message, RequestId
from ksana.messages.outputs import Failed, StepOutputs
from ksana.messages.perf import AddInferRequest, InferBatchReady
from ksana.messages.requests import Abort
from ksana.messages.status import EngineStatus
from ksana.perf.batch_run import BatchRun, Rounds, joined
from ksana.perf.batches import Batch
from ksana.perf.inputs import fill_seed, infer_requests
from ksana.perf.result import BatchResult
from ksana.perf.rounds import RoundTimer, TimedScheduler
from ksana.runtime.clock import now_s
from ksana.scheduling.fixed_batch import FixedBatchPolicy
from ksana.scheduling.scheduler import Scheduler
from ksana.scheduling.settings import SchedulerSettings

log = logging.getLogger(__name__)

WATCH_EVERY_S = 0.5
"""How often it is looked whether an actor broke: then nobody answers."""

OnRound = Callable[[int, str, int], None]
"""Told of each round done: how many batches are (of all passes), and of the present one its name and how
many rounds."""


class EnginePort(Protocol):
    """What the backend needs of the engine it measures."""

    def tell_scheduler(self, message: Message) -> None: ...

    def status(self) -> EngineStatus: ...


class ModelPerfBackend:
    """`make_scheduler` and `take_outputs` are for the engine that is to be measured; then `start_perf`."""

    def __init__(
        self,
        batches: Sequence[Batch],
        *,
        rounds: Rounds,
        seed: int,
        vocab_size: int,
        num_passes: int = 1,
        on_round: OnRound | None = None,
    ) -> None:
        """`num_passes`: how often all batches are measured, one after the other; samples are put together. A
        machine that is slower for a while then shows in a part of each rather than in all of some."""
        self._batches = batches
        self._rounds = rounds
        self._seed = seed
        self._vocab_size = vocab_size
        self._num_passes = num_passes
        self._num_done = 0
        """Batches, of all passes."""
        self._on_round = on_round
        self._timer = RoundTimer()
        self._max_in_flight = 1
        self._engine: EnginePort | None = None
        self._run: BatchRun | None = None
        self._over = trio.Event()
        """Every request of the batch has ended."""
        self._next_id: RequestId = 1
        self.results: list[BatchResult] = []
        """Of batches that are complete, also when `start_perf` is cancelled."""

    def make_scheduler(self, settings: SchedulerSettings) -> Scheduler:
        """The real scheduler with the policy of a fixed batch, and a clock around it."""
        self._timer.forget()
        self._max_in_flight = settings.max_steps
        return TimedScheduler(settings, FixedBatchPolicy(), self._timer)

    async def start_perf(self, engine: EnginePort, *, until_s: float | None = None) -> list[BatchResult]:
        """Measure one batch after the other; returns when all are complete, a result for each.

        Batches that have not begun at `until_s` (clock time) are left out, in a later pass as in the first.
        """
        self._engine = engine
        results = self.results
        for number, batch in list(enumerate(self._batches)) * self._num_passes:
            if until_s is not None and now_s() >= until_s:
                break
            result = await self._measure(number, batch)
            self._num_done += 1
            if number < len(results):
                results[number] = joined(results[number], result)
            else:
                results.append(result)
        return results

    async def _measure(self, number: int, batch: Batch) -> BatchResult:
        assert self._engine is not None
        requests = infer_requests(
            batch, number, seed=self._seed, vocab_size=self._vocab_size, first_id=self._next_id
        )
        self._next_id += len(requests)
        self._timer.forget()
        self._run = run = BatchRun(batch, self._rounds, [request.request_id for request in requests])
        self._over = trio.Event()
        self._tell(AddInferRequest(requests=requests, fill_seed=fill_seed(self._seed, number)))
        await self.batch_waiter()
        self._run = None
        if run.error is not None:
            log.error("batch %r failed: %s", batch.name, run.error)
        return run.result()

    def schedule(self) -> None:
        """Order the next rounds, as many as may be on their way; after the last the requests are aborted."""
        run = self._run
        assert run is not None
        for order in run.orders(self._max_in_flight, now_s()):
            self._tell(order)
        if run.is_complete:
            self._abort(run)

    def take_outputs(self, message: Message) -> None:
        """Called in the scheduler's task; answers at once, so that no round waits for this task."""
        run = self._run
        if run is None:
            return  # what a batch that was given up still says
        if isinstance(message, InferBatchReady):
            run.begin(message, now_s())
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
            self._on_round(self._num_done, run.batch.name, len(run.done))
        return True

    async def batch_waiter(self) -> None:
        """Wait until every request of the batch has ended, or an actor broke."""
        run, engine = self._run, self._engine
        assert run is not None
        assert engine is not None
        num_crashes = engine.status().num_core_crashes
        while not self._over.is_set():
            with trio.move_on_after(WATCH_EVERY_S):
                await self._over.wait()
            status = engine.status()
            if status.num_core_crashes != num_crashes or status.broken:
                run.fail("an actor of the engine broke; the log tells more")
                return

    def _take_endings(self, run: BatchRun, outputs: StepOutputs) -> None:
        for ended in outputs.ended:
            run.not_ended.discard(ended.request_id)
            if isinstance(ended.outcome, Failed):
                run.fail(ended.outcome.message)
        if not run.not_ended:
            self._over.set()

    def _abort(self, run: BatchRun) -> None:
        for request_id in sorted(run.not_ended):
            self._tell(Abort(request_id=request_id))

    def _tell(self, message: Message) -> None:
        assert self._engine is not None
        self._engine.tell_scheduler(message)
