"""From logits to tokens. A row's token depends on its own logits and parameters, never on its batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ksana.messages.requests import SamplingParams
from ksana.sampling.candidates import MAX_VOCABULARY, kept_tokens
from ksana.sampling.noise import row_key
from ksana.sampling.noise_torch import gumbels

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would only lose precision."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How to sample one row of logits."""

    sampling: SamplingParams
    choice_index: int
    output_position: int
    """0-based position of the token to be drawn among the choice's output tokens."""
    suppressed_token_ids: tuple[int, ...] = ()
    """Not drawn now: the caller leaves this empty once min_tokens is reached."""


@dataclass(frozen=True, slots=True)
class SampleError:
    """Why a row has no token."""

    message: str


def sample(logits: Tensor, rows: list[RowSampling]) -> list[int | SampleError]:
    """One token per row of logits float32 [R, V], which are left as they are.

    Order: suppressed ids out, temperature, top_k, top_p, min_p (see `candidates`), then the largest of
    z + Gumbel noise (see `noise`). Greedy rows take the largest logit. Equal ones: the lowest id.
    A row with a NaN or +Inf, or with nothing finite left, gets a SampleError and harms no other.
    """
    if (
        logits.dim() != 2
        or logits.dtype is not torch.float32
        or not logits.is_cpu
        or len(rows) != len(logits)
    ):
        raise ValueError(
            f"sample: wants float32 logits [{len(rows)}, V], not {logits.dtype} {tuple(logits.shape)}"
        )
    if not 1 <= logits.shape[1] <= MAX_VOCABULARY:
        raise ValueError(
            f"sample: a vocabulary of {logits.shape[1]} tokens; from 1 to {MAX_VOCABULARY} are possible"
        )
    return [_sample_row(logits[index], row) for index, row in enumerate(rows)]


def _sample_row(logits: Tensor, row: RowSampling) -> int | SampleError:
    if row.suppressed_token_ids:
        logits = logits.index_fill(0, torch.tensor(row.suppressed_token_ids), float("-inf"))
    largest = logits.max()
    if not torch.isfinite(largest):
        return SampleError(_not_finite(float(largest)))
    params = row.sampling
    if params.temperature < GREEDY_BELOW:
        return int((logits == largest).nonzero()[0])
    z = (logits - largest) / torch.tensor(params.temperature, dtype=torch.float32)
    key = row_key(params.seed, row.choice_index, row.output_position)
    kept = kept_tokens(z, params.top_k, params.top_p, params.min_p).sort().values
    scores = z[kept] + gumbels(key, len(z))[kept]
    return int(kept[(scores == scores.max()).nonzero()[0]])


def _not_finite(largest: float) -> str:
    if largest == float("-inf"):
        return "no token can be sampled: every logit is -inf or belongs to a suppressed token"
    what = "NaN" if largest != largest else "+inf"
    return f"the model's logits contain {what}; this request cannot go on"
