"""Rotary position embedding: tables of cosines and sines from a RopeSpec."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ksana.models.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position of each of the head_dim / 2 pairs, float32.

    theta ** (-2i / head_dim) (Su et al., RoFormer, 2021), then scaled: `linear` divides all by the factor;
    `llama3` (Llama 3.1's recipe) divides those whose wavelength exceeds original_max_position /
    low_freq_factor, keeps those below original_max_position / high_freq_factor, and blends between.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    freqs = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        freqs = freqs / rope.factor
    elif rope.kind == "llama3":
        freqs = _llama3(freqs, rope)
    if rope.freq_factors is not None:
        freqs = freqs / torch.tensor(rope.freq_factors, dtype=torch.float32)
    return freqs


def _llama3(freqs: Tensor, rope: RopeSpec) -> Tensor:
    turns = rope.original_max_position * freqs / (2 * math.pi)  # over the original context
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept_share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept_share) * freqs / rope.factor + kept_share * freqs


def rope_tables(rope: RopeSpec, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [num_positions, head_dim / 2] float32. The angle is rounded to float32 before the
    functions are taken, as transformers does: at large positions that rounding is visible in the logits."""
    positions = torch.arange(num_positions, dtype=torch.int64).float()
    angles = positions[:, None] * inverse_frequencies(rope, head_dim)
    return angles.cos(), angles.sin()
