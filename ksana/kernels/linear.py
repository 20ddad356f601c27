"""Products of activations with weights that were packed once, at load."""

from __future__ import annotations

import torch
from torch import Tensor

from ksana.kernels import reference
from ksana.kernels.checks import fail, is_dense
from ksana.kernels.library import native


class PackedWeight:
    """A weight matrix [out_features, in_features] in the layout the product reads fastest."""

    __slots__ = ("address", "data", "in_features", "is_native", "out_features")

    def __init__(self, data: Tensor, out_features: int, in_features: int, is_native: bool) -> None:
        self.data = data
        self.address = data.data_ptr()
        self.out_features = out_features
        self.in_features = in_features
        self.is_native = is_native

    @property
    def nbytes(self) -> int:
        """Bytes of memory it takes."""
        return self.data.numel() * self.data.element_size()


def pack_weight(weight: Tensor) -> PackedWeight:
    """Pack [N, K] float32, float16 or bfloat16 (converted to float32). Else raises ValueError."""
    if weight.dim() != 2 or not weight.is_cpu or 0 in weight.shape or max(weight.shape) >= 1 << 31:
        fail("pack_weight", "wants a non-empty matrix [N, K] in this machine's memory", weight=weight)
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        fail("pack_weight", "wants float32, float16 or bfloat16", weight=weight)
    n, k = weight.shape
    dense = weight.detach().float().contiguous()
    library = native()
    if library is None:
        return PackedWeight(dense.clone(), n, k, is_native=False)
    packed = torch.empty(library.packed_floats(n, k), dtype=torch.float32)
    library.use_huge_pages(packed.data_ptr(), packed.numel() * 4)
    if library.pack(dense.data_ptr(), packed.data_ptr(), n, k):
        raise library.error()
    return PackedWeight(packed, n, k, is_native=True)


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [M, K] float32 times weight transposed, plus bias [N]: [M, N].

    Each output is summed over k in rising order with fused multiply-adds, so the bits of a row do not
    depend on M. Reference: `reference.linear`; tolerance 1e-6 * sqrt(K) of the largest |x| * |w|.
    """
    n, k = weight.out_features, weight.in_features
    if x.dim() != 2 or x.shape[1] != k or not is_dense(x):
        fail("linear", f"wants contiguous float32 [M, {k}]", x=x)
    if bias is not None and (bias.shape != (n,) or not is_dense(bias)):
        fail("linear", f"wants a bias of {n} float32", bias=bias)
    if not weight.is_native:
        return reference.linear(x, weight.data, bias)
    library = native()
    assert library is not None
    m = x.shape[0]
    out = torch.empty((m, n), dtype=torch.float32)
    bias_address = None if bias is None else bias.data_ptr()
    if library.linear(x.data_ptr(), weight.address, bias_address, out.data_ptr(), m, n, k, k):
        raise library.error()
    return out
