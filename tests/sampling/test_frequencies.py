"""How often tokens are drawn, against the probabilities they should have."""

from __future__ import annotations

import math

import pytest
import torch

from ksana.sampling.sampler import sample
from tests.sampling.drawing import draw, logits_of, row


def chi_square_deviations(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    expected = probabilities.double() * len(tokens)
    assert (counts[expected == 0] == 0).all()
    common = expected >= 5
    counts = torch.cat((counts[common], counts[~common].sum()[None]))
    expected = torch.cat((expected[common], expected[~common].sum()[None]))
    used = expected > 0
    statistic = float(((counts[used] - expected[used]) ** 2 / expected[used]).sum())
    freedom = int(used.sum()) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_frequencies_are_the_softmax(temperature):
    logits = logits_of(40)
    tokens = draw(logits, 4000, temperature=temperature)
    assert chi_square_deviations(tokens, torch.softmax(logits.double() / temperature, 0)) < 5


def test_frequencies_by_seed_instead_of_position():
    logits = logits_of(40)
    tokens = torch.tensor([sample(logits[None], [row(seed=seed)])[0] for seed in range(2000)])
    assert chi_square_deviations(tokens, torch.softmax(logits.double(), 0)) < 5


def test_frequencies_within_top_k_and_top_p():
    logits = logits_of(60)
    p = torch.softmax(logits.double(), 0)
    largest = p.topk(12)
    inside = torch.zeros_like(p).scatter(0, largest.indices, largest.values)
    tokens = draw(logits, 3000, top_k=12)
    assert chi_square_deviations(tokens, inside / inside.sum()) < 5
    order = p.sort(descending=True)
    num = int((order.values.cumsum(0) - order.values < 0.8).sum())
    inside = torch.zeros_like(p).scatter(0, order.indices[:num], order.values[:num])
    assert chi_square_deviations(draw(logits, 3000, top_p=0.8), inside / inside.sum()) < 5
