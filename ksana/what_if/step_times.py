"""How long the recorded steps took, and a cost fitted to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ksana.costs.step_cost import StepShape, step_shape
from ksana.journal.activations import Heard, SegmentReader
from ksana.journal.reading import JournalError, Segment
from ksana.messages.base import StepId
from ksana.messages.steps import StepDone, StepPlan
from ksana.runtime.actor import Address

_ACTORS: tuple[Address, ...] = ("scheduler",)
MIN_STEPS = 20
"""Fewer say nothing about the next one."""
_HELD_OUT = 5
"""Every so many-th step is kept from the fit, to tell its error."""
_TINY_S = 1e-6


class RecordedStep(msgspec.Struct, frozen=True):
    """A step, and the seconds it took: from when it could begin until the scheduler heard of its end."""

    shape: StepShape
    seconds: float


class FittedStepCost(msgspec.Struct, frozen=True, kw_only=True):
    """fixed + per decode + per prefill token + per token of KV that decodes read + per pair of tokens in
    prefills; no part is below 0. Seconds."""

    fixed_s: float
    per_decode_s: float
    per_prefill_token_s: float
    per_decode_kv_s: float
    per_prefill_pair_s: float

    def seconds(self, shape: StepShape) -> float:
        return (
            self.fixed_s
            + self.per_decode_s * shape.num_decodes
            + self.per_prefill_token_s * (shape.num_tokens - shape.num_decodes)
            + self.per_decode_kv_s * shape.decode_kv
            + self.per_prefill_pair_s * shape.prefill_pairs
        )


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """A cost, and how far it is off on steps that it was not fitted to."""

    cost: FittedStepCost
    num_steps: int
    mean_error: float
    """Sum of predictions over sum of times, less 1."""
    typical_error: float
    """Median of the relative errors, without sign."""


def recorded_steps(segments: Sequence[Segment]) -> list[RecordedStep]:
    """The steps of these segments, in order. A step begins when it was planned, or when the one before it
    was done."""
    planned: dict[StepId, tuple[float, StepShape]] = {}
    steps: list[RecordedStep] = []
    last_done_s = 0.0
    for segment in segments:
        reader = SegmentReader(segment, _ACTORS)
        for one in reader.read():
            if not isinstance(one, Heard):
                continue
            for message in one.messages:
                if not isinstance(message, StepDone):
                    continue
                plan = planned.pop(message.step_id, None)
                if plan is not None:
                    begun_s = max(plan[0], last_done_s)
                    steps.append(RecordedStep(plan[1], max(one.now_s - begun_s, _TINY_S)))
                last_done_s = one.now_s
            for address, raw in one.said:
                if address == "executor":
                    said = reader.message(raw, one.offset)
                    if isinstance(said, StepPlan):
                        planned[said.step_id] = one.now_s, step_shape(said)
    return steps


def fit(steps: Sequence[RecordedStep]) -> Fit:
    """Least squares of relative errors. Raises JournalError when there are too few steps."""
    if len(steps) < MIN_STEPS:
        raise JournalError(f"{len(steps)} steps were recorded: {MIN_STEPS} are needed to tell their times")
    held_out = steps[::_HELD_OUT]
    kept = [step for place, step in enumerate(steps) if place % _HELD_OUT]
    cost = _fit(kept)
    predicted = np.array([cost.seconds(step.shape) for step in held_out])
    seconds = np.array([step.seconds for step in held_out])
    return Fit(
        cost=_fit(steps),
        num_steps=len(steps),
        mean_error=float(predicted.sum() / seconds.sum() - 1),
        typical_error=float(np.median(np.abs(predicted / seconds - 1))),
    )


def _fit(steps: Iterable[RecordedStep]) -> FittedStepCost:
    """Parts that come out negative are left out, the most negative first, and the rest is fitted again. The
    sum of all times is met."""
    rows = [
        (
            1.0,
            one.shape.num_decodes,
            one.shape.num_tokens - one.shape.num_decodes,
            one.shape.decode_kv,
            one.shape.prefill_pairs,
            one.seconds,
        )
        for one in steps
    ]
    table: NDArray[np.float64] = np.array(rows, dtype=np.float64)
    # A step counts by its share of error, and a few odd ones must not decide: none counts for more than
    # one of median length.
    weights = 1.0 / np.maximum(table[:, -1], np.median(table[:, -1]))
    features, target = table[:, :-1] * weights[:, None], table[:, -1] * weights
    names = list(range(features.shape[1]))
    parts = np.zeros(len(names))
    while names:
        scale = np.maximum(np.abs(features[:, names]).max(axis=0), 1e-300)
        found, *_ = np.linalg.lstsq(features[:, names] / scale, target, rcond=None)
        if found.min() >= 0:
            parts[names] = found / scale
            break
        del names[int(found.argmin())]
    # Steps that took long for reasons of their own pull nothing of this up, but the sum must be right.
    parts *= table[:, -1].sum() / (table[:, :-1] @ parts).sum()
    return FittedStepCost(
        fixed_s=float(parts[0]),
        per_decode_s=float(parts[1]),
        per_prefill_token_s=float(parts[2]),
        per_decode_kv_s=float(parts[3]),
        per_prefill_pair_s=float(parts[4]),
    )
