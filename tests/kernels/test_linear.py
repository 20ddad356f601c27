"""The product: right, and each row the same bits whatever the batch, the threads and the blocking."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ksana import kernels
from ksana.kernels import reference

SHAPES = [(1, 1), (5, 3), (31, 7), (33, 64), (64, 100), (129, 577), (960, 576), (70, 1536)]


def tolerance(x: torch.Tensor, w: torch.Tensor) -> float:
    return 1e-6 * math.sqrt(x.shape[1]) * float(x.abs().max() * w.abs().max())


@pytest.mark.parametrize("m", [1, 2, 7, 12, 13, 33, 150])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_close_to_float64(m, n, k):
    x, w, bias = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
    exact = x.double() @ w.double().T + bias.double()
    ours = kernels.linear(x, kernels.pack_weight(w), bias)
    assert (ours - exact).abs().max() <= tolerance(x, w)
    assert (reference.linear(x, w, bias) - exact).abs().max() <= tolerance(x, w)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_row_bits_do_not_depend_on_m(n, k):
    x, w, bias = torch.randn(300, k), kernels.pack_weight(torch.randn(n, k)), torch.randn(n)
    whole = kernels.linear(x, w, bias)
    for m in (*range(1, 26), 143, 144, 145, 288):
        start = 299 - m
        assert torch.equal(
            kernels.linear(x[start : start + m].contiguous(), w, bias), whole[start : start + m]
        ), m


def test_sum_is_sequential_with_one_rounding_per_step():
    """The promised order, emulated: float64 holds a product of float32 exactly, and the sum is then rounded
    once to float32 (double rounding cannot show here: the values have few bits)."""
    if not kernels.native_available() or "FMA" in kernels.describe():
        pytest.skip("only where the native kernels have fused multiply-add")
    k, n = 200, 40
    x = torch.randint(-(2**10), 2**10, (3, k)).float() / 64
    w = torch.randint(-(2**10), 2**10, (n, k)).float() / 32
    total = torch.zeros(3, n)
    for i in range(k):
        total = (total.double() + x[:, i : i + 1].double() * w[:, i].double()).float()
    assert torch.equal(kernels.linear(x, kernels.pack_weight(w)), total)


@pytest.mark.parametrize("m", [1, 8, 200])
def test_bits_do_not_depend_on_threads(with_threads, m):
    x, w = torch.randn(m, 576), kernels.pack_weight(torch.randn(700, 576))
    results = []
    for num_threads in (1, 2, 7):
        with_threads(num_threads)
        results.append(kernels.linear(x, w))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.usefixtures("reference_only")
def test_reference_rows_do_not_depend_on_m_either():
    x, w = torch.randn(40, 576), kernels.pack_weight(torch.randn(320, 576))
    whole = kernels.linear(x, w)
    for m in (1, 5, 8, 17):
        assert torch.equal(kernels.linear(x[3 : 3 + m].contiguous(), w), whole[3 : 3 + m])


@settings(max_examples=30, deadline=None)
@given(m=st.integers(1, 40), n=st.integers(1, 100), k=st.integers(1, 150), seed=st.integers(0, 99))
def test_random_shapes(m, n, k, seed):
    generator = torch.Generator().manual_seed(seed)
    x, w = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)
    packed = kernels.pack_weight(w)
    ours = kernels.linear(x, packed)
    assert (ours - x.double() @ w.double().T).abs().max() <= tolerance(x, w)
    assert torch.equal(kernels.linear(x[-1:].contiguous(), packed), ours[-1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_converted_exactly(dtype):
    x, w = torch.randn(2, 64), torch.randn(48, 64).to(dtype)
    ours = kernels.linear(x, kernels.pack_weight(w))
    assert torch.equal(ours, kernels.linear(x, kernels.pack_weight(w.float())))


def test_packed_weight_tells_its_size():
    weight = kernels.pack_weight(torch.randn(100, 64))
    assert (weight.out_features, weight.in_features) == (100, 64)
    assert 100 * 64 * 4 <= weight.nbytes <= 128 * 64 * 4


def test_nan_stays_in_its_row():
    x, w = torch.randn(20, 64), kernels.pack_weight(torch.randn(50, 64))
    expected = kernels.linear(x, w)
    x[7, 3] = float("nan")
    result = kernels.linear(x, w)
    assert result[7].isnan().all()
    others = [i for i in range(20) if i != 7]
    assert torch.equal(result[others], expected[others])


def test_no_rows():
    assert kernels.linear(torch.empty(0, 64), kernels.pack_weight(torch.randn(50, 64))).shape == (0, 50)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 63),
        torch.randn(64),
        torch.randn(2, 64).double(),
        torch.randn(64, 2).T,
        torch.randn(1, 2, 64),
    ],
)
def test_wrong_activations_are_refused(x):
    with pytest.raises(ValueError, match="linear"):
        kernels.linear(x, kernels.pack_weight(torch.randn(50, 64)))


@pytest.mark.parametrize("bias", [torch.randn(49), torch.randn(50).double(), torch.randn(100)[::2]])
def test_wrong_bias_is_refused(bias):
    with pytest.raises(ValueError, match="bias"):
        kernels.linear(torch.randn(2, 64), kernels.pack_weight(torch.randn(50, 64)), bias)


@pytest.mark.parametrize(
    "weight", [torch.randn(3), torch.randn(2, 3).double(), torch.empty(0, 4), torch.ones(2, 2).int()]
)
def test_wrong_weights_are_refused(weight):
    with pytest.raises(ValueError, match="pack_weight"):
        kernels.pack_weight(weight)
