"""From logits to tokens. A row's token depends on its own logits and parameters, never on its batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ksana.kernels import sampling as native_sampling
from ksana.kernels.library import native
from ksana.messages.requests import SamplingParams
from ksana.sampling.candidates import MAX_VOCABULARY, kept_tokens
from ksana.sampling.noise import row_key
from ksana.sampling.noise_torch import gumbels

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would only lose precision."""

MESSAGES = {
    native_sampling.NAN_LOGIT: "the model's logits contain NaN; this request cannot go on",
    native_sampling.INFINITE_LOGIT: "the model's logits contain +inf; this request cannot go on",
    native_sampling.NOTHING_LEFT: "no token can be sampled: every logit is -inf or of a suppressed token",
}


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How to sample one row of logits."""

    sampling: SamplingParams
    choice_index: int
    output_position: int
    """0-based position of the token to be drawn among the choice's output tokens."""
    suppressed_token_ids: tuple[int, ...] = ()
    """Not drawn now: the caller leaves this empty once min_tokens is reached. Ids beyond the vocabulary are
    without effect."""


@dataclass(frozen=True, slots=True)
class SampleError:
    """Why a row has no token."""

    message: str


def sample(logits: Tensor, rows: Sequence[RowSampling]) -> list[int | SampleError]:
    """One token per row of logits float32 [R, V], which are left as they are.

    Order: suppressed ids out, temperature, top_k, top_p, min_p (see `candidates`), then the largest of
    z + Gumbel noise (see `noise`). Greedy rows (`is_greedy`) take the largest logit. Equal ones: the lowest
    id.
    A row with a NaN or +inf, or with nothing finite left, gets a SampleError and harms no other.
    Parameters are taken to be valid (`ksana.sampling.params.validate`). Native and plain torch give the
    same tokens. Raises ValueError for logits of another shape or type.
    """
    if (
        logits.dim() != 2
        or logits.dtype is not torch.float32
        or not logits.is_cpu
        or len(rows) != len(logits)
    ):
        shape = f"{logits.dtype} {tuple(logits.shape)} on {logits.device}"
        raise ValueError(f"sample: wants float32 logits [{len(rows)}, V], not {shape}")
    if not 1 <= logits.shape[1] <= MAX_VOCABULARY:
        raise ValueError(
            f"sample: a vocabulary of {logits.shape[1]}; from 1 to {MAX_VOCABULARY} are possible"
        )
    if not rows:
        return []
    library = native()
    if library is None:
        tokens = [sample_row(logits[index], row) for index, row in enumerate(rows)]
    else:
        tokens = native_sampling.sample_rows(library, logits.contiguous(), [_parameters(row) for row in rows])
    return [token if token >= 0 else SampleError(MESSAGES[token]) for token in tokens]


def is_greedy(sampling: SamplingParams) -> bool:
    """Whether only the likeliest token may be drawn."""
    return sampling.temperature < GREEDY_BELOW or sampling.top_p <= 0.0


def _parameters(row: RowSampling) -> native_sampling.RowParameters:
    p = row.sampling
    temperature = 0.0 if is_greedy(p) else p.temperature
    return (
        *(p.seed, row.choice_index, row.output_position),
        *(temperature, p.min_p, p.top_p, p.top_k, row.suppressed_token_ids),
    )


def sample_row(logits: Tensor, row: RowSampling) -> int:
    """The definition, in plain torch: a token for logits [V], or a key of MESSAGES."""
    suppressed = [token for token in row.suppressed_token_ids if 0 <= token < len(logits)]
    if suppressed:
        logits = logits.index_fill(0, torch.tensor(suppressed), float("-inf"))
    largest = logits.max()
    if not torch.isfinite(largest):
        return _what_is_wrong(float(largest))
    params = row.sampling
    if is_greedy(params):
        return int((logits == largest).nonzero()[0])
    z = (logits - largest) / torch.tensor(params.temperature, dtype=torch.float32)
    key = row_key(params.seed, row.choice_index, row.output_position)
    kept = kept_tokens(z, params.top_k, params.top_p, params.min_p).sort().values
    scores = z[kept] + gumbels(key, len(z))[kept]
    return int(kept[(scores == scores.max()).nonzero()[0]])


def _what_is_wrong(largest: float) -> int:
    if largest == float("-inf"):
        return native_sampling.NOTHING_LEFT
    return native_sampling.NAN_LOGIT if largest != largest else native_sampling.INFINITE_LOGIT
