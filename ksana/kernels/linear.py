"""Products of activations with weights that were packed once, at load."""

from __future__ import annotations

import torch
from torch import Tensor

from ksana.kernels import reference
from ksana.kernels.checks import fail, is_dense


class PackedWeight:
    """A weight matrix [out_features, in_features] in the layout the product reads fastest."""

    __slots__ = ("data", "in_features", "out_features")

    def __init__(self, data: Tensor, out_features: int, in_features: int) -> None:
        self.data = data
        self.out_features = out_features
        self.in_features = in_features

    @property
    def nbytes(self) -> int:
        """Bytes of memory it takes."""
        return self.data.numel() * self.data.element_size()


def pack_weight(weight: Tensor) -> PackedWeight:
    """Pack [N, K] float32, float16 or bfloat16 (converted to float32). Else raises ValueError."""
    if weight.dim() != 2 or not weight.is_cpu or 0 in weight.shape:
        fail("pack_weight", "wants a non-empty matrix [N, K] in this machine's memory", weight=weight)
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        fail("pack_weight", "wants float32, float16 or bfloat16", weight=weight)
    n, k = weight.shape
    return PackedWeight(weight.detach().float().contiguous().clone(), n, k)


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [M, K] float32 times weight transposed, plus bias [N]: [M, N].

    Each output is summed over k in rising order with fused multiply-adds, so the bits of a row do not
    depend on M. Reference: `reference.linear`; tolerance 2e-6 * sqrt(K) * max|x| * max|w|.
    """
    if x.dim() != 2 or x.shape[1] != weight.in_features or not is_dense(x):
        fail("linear", f"wants contiguous float32 [M, {weight.in_features}]", x=x)
    if bias is not None and (bias.shape != (weight.out_features,) or not is_dense(bias)):
        fail("linear", f"wants a bias of {weight.out_features} float32", bias=bias)
    return reference.linear(x, weight.data, bias)
