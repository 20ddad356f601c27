"""One batch while it is measured: which rounds are still to be run, and what came of those that were."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ksana.messages.base import RequestId
from ksana.messages.perf import InferBatchReady, RunInferRound
from ksana.perf.batches import Batch
from ksana.perf.result import BatchResult, OperatorSample, RoundSample, summarize
from ksana.perf.rounds import MeasuredRound

MIN_STAT = 2


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


class BatchRun:
    """Rounds are ordered and done in the same order, so they are known by their number."""

    def __init__(self, batch: Batch, rounds: Rounds, request_ids: Sequence[RequestId]) -> None:
        self.batch = batch
        self.not_ended = set(request_ids)
        self.done: list[MeasuredRound] = []
        self.error: str | None = None
        self._rounds = rounds
        self._ready: InferBatchReady | None = None
        self._began_s = 0.0
        self._num_ordered = 0
        self._num_wanted = rounds.total

    def begin(self, ready: InferBatchReady, now_s: float) -> None:
        """Its blocks stand; rounds may be ordered."""
        self._ready, self._began_s = ready, now_s

    def orders(self, max_in_flight: int, now_s: float) -> list[RunInferRound]:
        """The next rounds, as many as may be on their way besides those that are."""
        rounds = self._rounds
        is_enough = rounds.enough_s is not None and now_s - self._began_s >= rounds.enough_s
        if is_enough and len(self.done) >= rounds.warmup + MIN_STAT:
            self._num_wanted = self._num_ordered
        end = min(self._num_wanted, len(self.done) + max_in_flight)
        orders = [
            RunInferRound(
                num_layer_rounds=self.batch.layer_forward_round,
                trace_operators=number >= rounds.warmup + rounds.stat,
            )
            for number in range(self._num_ordered, end)
        ]
        self._num_ordered += len(orders)
        return orders

    @property
    def is_complete(self) -> bool:
        """Every round that is wanted is done."""
        return len(self.done) == self._num_wanted

    def fail(self, why: str) -> None:
        """The first reason is the one that counts."""
        if self.error is None:
            self.error = why

    def result(self) -> BatchResult:
        shape, rounds = self.batch.shape(), self._rounds
        if self._ready is not None:
            swa_use = self._ready.swa_use
            shape = msgspec.structs.replace(
                shape,
                num_fa_blocks=self._ready.fa_use.num_referenced,
                num_swa_blocks=swa_use.num_referenced if swa_use is not None else 0,
            )
        measured = self.done[rounds.warmup :] if self.error is None else []
        samples = tuple(_divided(one) for one in measured if not one.trace_operators)
        return BatchResult(
            name=self.batch.name,
            shape=shape,
            warmup_rounds=rounds.warmup,
            stat_rounds=rounds.stat if self.error is not None else len(samples),
            layer_forward_round=self.batch.layer_forward_round,
            rounds=samples,
            operator_rounds=tuple(_operators(one) for one in measured if one.trace_operators),
            summary=summarize(samples),
            error=self.error,
        )


def joined(first: BatchResult, second: BatchResult) -> BatchResult:
    """One batch, measured twice. An error of either is that of both, and there are no samples then."""
    error = first.error or second.error
    if error is not None:
        return msgspec.structs.replace(first, rounds=(), operator_rounds=(), summary={}, error=error)
    rounds = first.rounds + second.rounds
    return msgspec.structs.replace(
        first,
        stat_rounds=len(rounds),
        rounds=rounds,
        operator_rounds=first.operator_rounds + second.operator_rounds,
        summary=summarize(rounds),
    )


def _divided(one: MeasuredRound) -> RoundSample:
    """The model's time, split between one run and the repeats; nothing of the round is lost."""
    forward_ns = one.sample.forward_ns // one.num_layer_rounds
    repeats_ns = one.sample.forward_ns - forward_ns
    return msgspec.structs.replace(one.sample, forward_ns=forward_ns, repeats_ns=repeats_ns)


def _operators(one: MeasuredRound) -> dict[str, OperatorSample]:
    return {
        operator.name: OperatorSample(total_ns=operator.total_ns, calls=operator.num_calls)
        for operator in one.operators
    }
