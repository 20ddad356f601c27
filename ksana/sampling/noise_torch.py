"""The noise of `ksana.sampling.noise` for all tokens of a vocabulary, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ksana.sampling.noise import MASK

LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440e-4
"""log 2 in two parts; the first has 10 bits, so that it times an exponent is exact (Cody and Waite)."""

LOG_POLYNOMIAL = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
"""log(1 + f) = f - f^2/2 + f^3 P(f) for 0.70 < 1 + f < 1.42: the minimax P of the Cephes library's logf."""


def token_hashes(key: tuple[int, int], num_tokens: int) -> Tensor:
    """`noise.token_hash` of ids 0..num_tokens-1: int64 [num_tokens] with values below 2^32."""
    x = torch.arange(num_tokens, dtype=torch.int64) ^ key[0]
    x ^= x >> 17
    x = x * 0xED5AD4BB & MASK
    x ^= x >> 11
    x = x + key[1] & MASK
    x = x * 0xAC4C1B51 & MASK
    x ^= x >> 15
    x = x * 0x31848BAB & MASK
    return x ^ x >> 14


def uniforms(hashes: Tensor) -> Tensor:
    """(hash + 0.5) / 2^32 in float32: the two 16-bit halves are exact, their sum is rounded once."""
    high = (hashes >> 16).float() * 2.0**-16
    low = ((hashes & 0xFFFF).float() + 0.5) * 2.0**-32
    return torch.minimum(high + low, torch.tensor(1 - 2.0**-24))


def _log_1p(f: Tensor, exponent: Tensor) -> Tensor:
    """log(1 + f) + exponent * log 2."""
    square = f * f
    p = torch.full_like(f, LOG_POLYNOMIAL[0])
    for coefficient in LOG_POLYNOMIAL[1:]:
        p = p * f + coefficient
    tail = p * f * square + exponent * LN2_LOW
    return (tail - square * 0.5) + f + exponent * LN2_HIGH


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """x = (1 + f) * 2^exponent with 0.70 < 1 + f <= 1.42, for normal positive x."""
    bits = x.view(torch.int32) - 0x3F3504F3
    exponent = bits >> 23
    mantissa = ((bits & 0x007FFFFF) + 0x3F3504F3).view(torch.float32)
    return mantissa - 1.0, exponent.float()


def exponentials(u: Tensor) -> Tensor:
    """-log(1 - u): exponentially distributed, exact to a few units in the last place, from 2^-33 to 16.7."""
    f, exponent = _split(1.0 - u)
    near_one = u < 0.25
    f = torch.where(near_one, -u, f)
    exponent = torch.where(near_one, torch.zeros_like(exponent), exponent)
    return -_log_1p(f, exponent)


def gumbels(key: tuple[int, int], num_tokens: int) -> Tensor:
    """-log of the exponentials: argmax(logits + gumbels) draws from softmax(logits). float32 [num_tokens]."""
    return -_log_1p(*_split(exponentials(uniforms(token_hashes(key, num_tokens)))))
