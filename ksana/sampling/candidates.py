"""Which tokens may be drawn: top_k, then top_p, then min_p, in plain torch (the native sampler's reference).

Tokens are ranked by z = (logit - largest logit) / temperature, equal ones by the lower id. Each limit keeps
a prefix of that ranking, so the result is one number: how many are kept.

    top_k   the first k
    top_p   of those, the fewest whose probability mass, among them, is at least top_p
    min_p   of those, the ones at least min_p times as likely as the first

Masses are sums of integers, floor(exp(z) * 2^42), so that they are exact in whatever order they are added.
"""

from __future__ import annotations

import torch
from torch import Tensor

WEIGHT_ONE = 2.0**42
"""Weight of the likeliest token. With at most 2^20 tokens the sum stays below 2^62."""
MAX_VOCABULARY = 1 << 20
LOWEST_Z = -87.0
"""exp of less is taken as 0: nothing that can be drawn or counted."""

EXP_POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
"""exp(r) = 1 + r + r^2 P(r) for |r| <= log(2) / 2: the minimax P of the Cephes library's expf."""


def exp_weights(z: Tensor) -> Tensor:
    """exp(z) for z <= 0, float32, by exactly rounded steps only (compare `noise_torch`)."""
    clamped = torch.maximum(z, torch.tensor(LOWEST_Z))
    n = torch.floor(clamped * 1.44269504088896341 + 0.5)
    r = (clamped - n * 0.693359375) - n * -2.12194440e-4
    p = torch.full_like(r, EXP_POLYNOMIAL[0])
    for coefficient in EXP_POLYNOMIAL[1:]:
        p = p * r + coefficient
    y = (p * (r * r) + r) + 1.0
    scale = ((n.to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(z < LOWEST_Z, torch.zeros_like(y), y * scale)


def kept_tokens(z: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Ids of the tokens that may be drawn, likeliest first. z float32 [V], its largest value 0."""
    order = torch.sort(z, descending=True, stable=True).indices
    order = order[z[order] > float("-inf")]
    if top_k > 0:
        order = order[:top_k]
    weights = exp_weights(z[order])
    if top_p < 1.0:
        masses = (weights * WEIGHT_ONE).to(torch.int64)
        before = masses.cumsum(0) - masses
        wanted = torch.tensor(top_p, dtype=torch.float64) * masses.sum().double()
        order = order[: max(1, int((before.double() < wanted).sum()))]
        weights = weights[: len(order)]
    if min_p > 0.0:
        order = order[weights >= torch.tensor(min_p, dtype=torch.float32)]
    return order
