"""top_k, top_p and min_p sets against a brute-force model in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ksana.sampling.candidates import exp_weights, kept_tokens


def brute_force(z: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The definition with real probabilities, in float64."""
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))
    if top_k:
        order = order[:top_k]
    p = np.exp(z[order].astype(np.float64))
    if top_p < 1:
        p /= p.sum()
        before = np.cumsum(p) - p
        order = [token for token, mass in zip(order, before, strict=True) if mass < top_p]
    p = np.exp(z[order].astype(np.float64))
    return {token for token, weight in zip(order, p, strict=True) if weight >= min_p}


def shifted(logits: torch.Tensor) -> torch.Tensor:
    return logits - logits.max()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=st.integers(1, 200),
    spread=st.sampled_from([0.01, 1.0, 8.0]),
    top_k=st.integers(0, 210),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.0, 0.013, 0.3, 1.0]),
    rounded=st.booleans(),
)
def test_sets_equal_the_brute_force_model(seed, size, spread, top_k, top_p, min_p, rounded):
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread
    z = shifted((logits * 2).round() / 2 if rounded else logits)
    ours = set(kept_tokens(z, top_k, top_p, min_p).tolist())
    model = brute_force(z.numpy(), top_k, top_p, min_p)
    if ours != model:  # only where float64's own rounding decides: the mass at the border equals top_p
        wider = brute_force(z.numpy(), top_k, top_p + 1e-6, min_p * (1 - 1e-6))
        narrower = brute_force(z.numpy(), top_k, top_p - 1e-6, min_p * (1 + 1e-6))
        assert narrower <= ours <= wider


def test_ties_at_the_border_go_to_the_lowest_ids():
    z = torch.tensor([-1.0, 0.0, -1.0, -1.0, 0.0, -1.0])
    assert kept_tokens(z, 3, 1.0, 0.0).tolist() == [1, 4, 0]
    equal = torch.zeros(10)
    assert kept_tokens(equal, 0, 0.35, 0.0).tolist() == [0, 1, 2, 3]


def test_something_is_always_kept():
    assert kept_tokens(torch.tensor([-2.0, 0.0]), 0, 1e-300, 0.0).tolist() == [1]
    assert kept_tokens(torch.tensor([-2.0, 0.0]), 1, 0.5, 1.0).tolist() == [1]


def test_what_is_impossible_is_not_kept():
    z = torch.tensor([0.0, float("-inf"), -1.0])
    assert kept_tokens(z, 3, 1.0, 0.0).tolist() == [0, 2]


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_top_p_is_of_what_top_k_left(top_p):
    z = shifted(torch.randn(50))
    both = kept_tokens(z, 10, top_p, 0.0).tolist()
    ten = kept_tokens(z, 10, 1.0, 0.0)
    p = torch.softmax(z[ten].double(), 0)
    mass = p[: len(both)].sum()
    assert both == ten[: len(both)].tolist()
    assert mass >= top_p
    assert len(both) == 1 or p[: len(both) - 1].sum() < top_p


def test_weights_are_accurate():
    z = -torch.rand(100_000) * 87
    exact = z.double().exp()
    assert ((exp_weights(z) - exact) / exact).abs().max() < 2e-7
    edges = exp_weights(torch.tensor([0.0, -0.0, -87.5, -1e30, float("-inf")]))
    assert edges.tolist() == [1, 1, 0, 0, 0]
