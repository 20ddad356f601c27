"""Rows and draws for the sampler tests."""

from __future__ import annotations

import torch

from ksana.messages.requests import SamplingParams
from ksana.sampling.sampler import RowSampling, sample


def row(
    seed: int = 0, position: int = 0, choice: int = 0, suppressed: tuple[int, ...] = (), **params
) -> RowSampling:
    return RowSampling(SamplingParams(seed=seed, **params), choice, position, suppressed)


def logits_of(size: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


def draw(logits: torch.Tensor, count: int, **params) -> torch.Tensor:
    """`count` draws at successive positions."""
    tokens = []
    for start in range(0, count, 500):
        rows = [row(position=start + i, **params) for i in range(min(500, count - start))]
        tokens += sample(logits.expand(len(rows), -1), rows)
    return torch.tensor(tokens)
