"""The noise: one definition, three computations, equal in every bit; and statistically fit for sampling."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ksana.kernels import sampling as native_sampling
from ksana.kernels.library import native
from ksana.sampling import noise, noise_torch

KEYS = [
    (0, 0, 0),
    (1, 0, 0),
    (0, 1, 0),
    (0, 0, 1),
    (2**64 - 1, 2**32 - 1, 2**32 - 1),
    (0xDEADBEEF12345678, 3, 77),
]


def f32(x: float) -> float:
    """Round to float32, once."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def bits(x: float) -> int:
    return struct.unpack("<i", struct.pack("<f", x))[0]


def from_bits(i: int) -> float:
    return struct.unpack("<f", struct.pack("<i", i))[0]


def scalar_log_1p(f: float, exponent: float) -> float:
    """The stated order of steps, in Python: float64 holds sum or product of two float32 well enough that
    rounding it to float32 is the same as one rounding (53 >= 2 * 24 + 2 bits)."""
    square = f32(f * f)
    p = f32(noise_torch.LOG_POLYNOMIAL[0])
    for c in noise_torch.LOG_POLYNOMIAL[1:]:
        p = f32(f32(p * f) + f32(c))
    tail = f32(f32(f32(p * f) * square) + f32(exponent * f32(noise_torch.LN2_LOW)))
    high = f32(exponent * f32(noise_torch.LN2_HIGH))
    return f32(f32(f32(tail - f32(square * 0.5)) + f) + high)


def scalar_split(x: float) -> tuple[float, float]:
    i = bits(x) - 0x3F3504F3
    return f32(from_bits((i & 0x7FFFFF) + 0x3F3504F3) - 1.0), float(i >> 23)


def scalar_gumbel(key: tuple[int, int], token_id: int) -> float:
    h = noise.token_hash(key, token_id)
    u = min(f32((h >> 16) * 2.0**-16 + ((h & 0xFFFF) + 0.5) * 2.0**-32), 1 - 2.0**-24)
    f, exponent = (-u, 0.0) if u < 0.25 else scalar_split(f32(1.0 - u))
    exponential = -scalar_log_1p(f, exponent)
    return -scalar_log_1p(*scalar_split(exponential))


@pytest.mark.parametrize("key", KEYS)
def test_torch_equals_plain_python(key):
    words = noise.row_key(*key)
    got = noise_torch.gumbels(words, 3000).tolist()
    assert got == [scalar_gumbel(words, token) for token in range(3000)]
    assert noise_torch.token_hashes(words, 100).tolist() == [noise.token_hash(words, t) for t in range(100)]


@pytest.mark.parametrize("key", KEYS)
def test_native_equals_torch(key):
    library = native()
    if library is None:
        pytest.skip("no native kernels here")
    for count in (1, 15, 16, 17, 262_147):
        ours = native_sampling.gumbels(library, *key, count)
        assert torch.equal(ours, noise_torch.gumbels(noise.row_key(*key), count))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_all_three_agree_for_any_key(seed, choice, position):
    words = noise.row_key(seed, choice, position)
    ours = noise_torch.gumbels(words, 40)
    assert ours.tolist() == [scalar_gumbel(words, token) for token in range(40)]
    library = native()
    if library is not None:
        assert torch.equal(native_sampling.gumbels(library, seed, choice, position, 40), ours)


def test_the_definition_does_not_drift():
    """Values of the first version: a change would silently change every seeded answer."""
    assert noise.row_key(0, 0, 0) == PINNED_KEY
    assert [noise.token_hash(PINNED_KEY, token) for token in range(4)] == PINNED_HASHES


PINNED_KEY = (0x7D2216FD, 0x5EE71EAF)
PINNED_HASHES = [0x72045316, 0xE2A0528F, 0x412F4F6F, 0x41B3A83F]


@pytest.mark.parametrize("key", [(-1, 0, 0), (2**64, 0, 0), (0, -1, 0), (0, 0, 2**32)])
def test_keys_out_of_range(key):
    with pytest.raises(ValueError, match="out of range"):
        noise.row_key(*key)


def edge_uniforms() -> torch.Tensor:
    return noise_torch.uniforms(torch.tensor([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF]))


def test_the_ends_of_the_range():
    u = edge_uniforms()
    assert float(u.min()) == 2.0**-33
    assert float(u.max()) == 1 - 2.0**-24
    e = noise_torch.exponentials(u)
    assert torch.isfinite(e).all()
    assert (e > 0).all()


def test_transforms_are_accurate():
    u = noise_torch.uniforms(noise_torch.token_hashes((5, 6), 1 << 18))
    exact = -torch.log1p(-u.double())
    e = noise_torch.exponentials(u)
    assert ((e - exact) / exact).abs().max() < 5e-7
    g = noise_torch.gumbels((5, 6), 1 << 18)
    assert (g - -torch.log(exact)).abs().max() < 2e-6


def chi_square(counts: torch.Tensor) -> float:
    """Distance from equal counts in standard deviations of the statistic."""
    expected = counts.sum() / counts.numel()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = counts.numel() - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def draws(axis: str, count: int) -> torch.Tensor:
    """Hashes where one of the four inputs counts up and the others stand still."""
    if axis == "token":
        return noise_torch.token_hashes(noise.row_key(1, 0, 0), count)
    at = {
        "seed": lambda i: (i, 0, 0),
        "high seed": lambda i: (i << 32, 0, 0),
        "choice": lambda i: (1, i, 0),
        "position": lambda i: (1, 0, i),
    }[axis]
    return torch.tensor([noise.token_hash(noise.row_key(*at(i)), 17) for i in range(count)])


@pytest.mark.parametrize("axis", ["token", "seed", "high seed", "choice", "position"])
class TestStatistics:
    def test_every_byte_is_uniform(self, axis):
        h = draws(axis, 20_000)
        for shift in (0, 8, 16, 24):
            counts = torch.bincount(h >> shift & 255, minlength=256).double()
            assert abs(chi_square(counts)) < 5

    def test_neighbours_are_independent(self, axis):
        h = draws(axis, 20_000)
        for lag in (1, 2, 16):
            pairs = (h[:-lag] >> 28) * 16 + (h[lag:] >> 28)
            assert abs(chi_square(torch.bincount(pairs, minlength=256).double())) < 5
            a, b = h[:-lag].double(), h[lag:].double()
            correlation = torch.corrcoef(torch.stack((a, b)))[0, 1]
            assert abs(float(correlation)) < 5 / math.sqrt(len(a))

    def test_one_more_changes_half_the_bits(self, axis):
        h = draws(axis, 4_000)
        changed = h[1:] ^ h[:-1]
        flips = torch.stack([(changed >> bit & 1).double().mean() for bit in range(32)])
        assert (flips - 0.5).abs().max() < 5 * 0.5 / math.sqrt(4_000)


def test_rows_are_independent_across_tokens():
    """Noise of all tokens at neighbouring positions, seeds and choices: no correlation, no shared winner."""
    keys = [(1, 0, 0), (1, 0, 1), (1, 0, 2), (2, 0, 0), (1, 1, 0), (0, 1, 1), (1 << 32, 0, 0)]
    rows = torch.stack([noise_torch.gumbels(noise.row_key(*key), 50_000) for key in keys])
    correlations = torch.corrcoef(rows.double()) - torch.eye(len(keys))
    assert correlations.abs().max() < 5 / math.sqrt(50_000)
    assert len(set(rows.argmax(1).tolist())) == len(keys)


def test_gumbels_have_their_mean_and_variance():
    g = noise_torch.gumbels(noise.row_key(9, 0, 0), 1 << 20).double()
    assert abs(float(g.mean()) - 0.5772156649) < 5 * 1.2825 / 1024
    assert abs(float(g.var()) - math.pi**2 / 6) < 0.02
