"""Compute kernels for CPUs: torch tensors in and out, float32, results that do not depend on the batch.

Each runs natively (C, compiled on first use) or, without a compiler, as its plain-torch reference; see
`describe`. They know nothing of the rest of Ksana. The native thread pool does not survive fork.
"""

from __future__ import annotations

from ksana.kernels.attention import paged_attention
from ksana.kernels.library import describe, native_available, set_num_threads
from ksana.kernels.linear import PackedWeight, linear, pack_weight
from ksana.kernels.pointwise import add_rms_norm, gelu_tanh_mul, rms_norm, rope, silu_mul, write_kv

__all__ = [
    "PackedWeight",
    "add_rms_norm",
    "describe",
    "gelu_tanh_mul",
    "linear",
    "native_available",
    "pack_weight",
    "paged_attention",
    "rms_norm",
    "rope",
    "set_num_threads",
    "silu_mul",
    "write_kv",
]
