"""How long a step takes, from what it computes: the shape of a step, and the simplest cost, a linear one."""

from __future__ import annotations

from typing import Protocol

import msgspec

from ksana.messages.steps import StepPlan


class StepShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a step computes, in numbers. A row with one token is a *decode*, whatever made it so; one with
    more is a *prefill*."""

    num_tokens: int
    num_rows: int
    num_samples: int
    """Rows whose logits give a token."""
    prefills: tuple[tuple[int, int], ...] = ()
    """(tokens computed, tokens of KV before them), one per prefill."""
    num_decodes: int = 0
    decode_kv: int = 0
    """Sum over decodes of the tokens of KV before theirs."""
    max_decode_kv: int = 0
    decode_lengths: tuple[int, ...] = ()
    """The same, one by one; may be left empty, for decodes of equal length."""

    @property
    def prefill_kv(self) -> int:
        """Tokens of KV that prefills read, each once: theirs and those before."""
        return sum([tokens + before for tokens, before in self.prefills])

    @property
    def prefill_pairs(self) -> int:
        """Pairs of a token that prefills compute and a token it attends to (itself included)."""
        return sum([tokens * before + tokens * (tokens + 1) // 2 for tokens, before in self.prefills])

    @property
    def num_attended_tokens(self) -> int:
        """Sum over rows of the context length at the row's last token: KV read, roughly."""
        return self.prefill_kv + self.decode_kv + self.num_decodes


def step_shape(plan: StepPlan) -> StepShape:
    """The shape of a plan; block copies and table edits are not in it. O(rows)."""
    rows = plan.rows
    prefills = []
    lengths = []
    num_samples = 0
    for row in rows:
        num_samples += row.sample
        if row.num_tokens == 1:
            lengths.append(row.start)
        else:
            prefills.append((row.num_tokens, row.start))
    return StepShape(
        num_tokens=len(lengths) + sum([tokens for tokens, _ in prefills]),
        num_rows=len(rows),
        num_samples=num_samples,
        prefills=tuple(prefills),
        num_decodes=len(lengths),
        decode_kv=sum(lengths),
        max_decode_kv=max(lengths, default=0),
        decode_lengths=tuple(lengths),
    )


class StepCost(Protocol):
    """Predicts the seconds a step takes. Raises ExtrapolationError for a shape it was not made for, unless
    it was told to go on and count."""

    def seconds(self, shape: StepShape) -> float: ...


class LinearStepCost(msgspec.Struct, frozen=True, kw_only=True, tag="linear", forbid_unknown_fields=True):
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
