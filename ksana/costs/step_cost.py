"""How long a step takes, from what it computes: the simplest cost model, a linear one."""

from __future__ import annotations

from typing import Protocol

import msgspec

from ksana.messages.steps import StepPlan


class StepShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a step computes, in numbers."""

    num_rows: int
    num_tokens: int
    num_attended_tokens: int
    """Sum over rows of the context length at the row's last token: KV read, roughly."""


def step_shape(plan: StepPlan) -> StepShape:
    """The shape of a plan; block copies and table edits are not in it."""
    return StepShape(
        num_rows=len(plan.rows),
        num_tokens=sum(row.num_tokens for row in plan.rows),
        num_attended_tokens=sum(row.start + row.num_tokens for row in plan.rows),
    )


class StepCost(Protocol):
    """Predicts the seconds a step takes."""

    def seconds(self, shape: StepShape) -> float: ...


class LinearStepCost(msgspec.Struct, frozen=True, kw_only=True):
    """fixed + per token + per attended token. The defaults are of the order of a small model on a CPU."""

    fixed_s: float = 5e-3
    per_token_s: float = 1e-3
    per_attended_token_s: float = 1e-6

    def seconds(self, shape: StepShape) -> float:
        return (
            self.fixed_s
            + self.per_token_s * shape.num_tokens
            + self.per_attended_token_s * shape.num_attended_tokens
        )
