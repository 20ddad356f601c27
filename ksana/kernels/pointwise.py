"""Norms, rotary embedding, gated activations and the KV write: small kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ksana.kernels import reference
from ksana.kernels.checks import fail, is_dense, is_heads
from ksana.kernels.library import native


def rms_norm(x: Tensor, weight: Tensor, eps: float, add_one: bool = False) -> Tensor:
    """[M, H] / sqrt(mean of squares + eps) * weight [H]; add_one multiplies by 1 + weight (Gemma).

    Any leading dimensions. Tolerance against the reference: 1e-6 relative.
    """
    if not is_dense(x) or not is_dense(weight) or x.dim() < 1 or weight.shape != x.shape[-1:]:
        fail("rms_norm", "wants contiguous float32 x [..., H] and weight [H]", x=x, weight=weight)
    library = native()
    if library is None:
        return reference.rms_norm(x, weight, eps, add_one)
    out = torch.empty_like(x)
    width = weight.shape[0]
    rows = x.numel() // width if width else 0
    library.rms_norm(x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), rows, width, eps, float(add_one))
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, add_one: bool = False) -> Tensor:
    """residual [M, H] += x in place; returns rms_norm(residual)."""
    if not is_dense(x) or not is_dense(residual) or not is_dense(weight) or x.shape != residual.shape:
        fail("add_rms_norm", "wants contiguous float32 x and residual [M, H]", x=x, residual=residual)
    if weight.shape != x.shape[-1:]:
        fail("add_rms_norm", "wants weight [H]", x=x, weight=weight)
    library = native()
    if library is None:
        return reference.add_rms_norm(x, residual, weight, eps, add_one)
    out = torch.empty_like(x)
    width = weight.shape[0]
    rows = x.numel() // width if width else 0
    library.rms_norm(
        *(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr()),
        rows,
        width,
        eps,
        float(add_one),
    )
    return out


def rope(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate q [T, H, D] and k [T, KVH, D] in place, rotate-half form: pair (i, i + D/2).

    Both may be slices of one qkv buffer. positions int64 [T]; cos, sin [max_pos, D/2] float32.
    Raises ValueError when a position is outside of the tables (then nothing is promised of q and k).
    """
    if not is_heads(q) or not is_heads(k) or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        fail("rope", "wants float32 q [T, H, D] and k [T, KVH, D] with dense heads", q=q, k=k)
    if q.shape[2] % 2 or not is_dense(positions, torch.int64) or positions.shape != q.shape[:1]:
        fail("rope", "wants an even D and int64 positions [T]", q=q, positions=positions)
    if not is_dense(cos) or not is_dense(sin) or cos.dim() != 2 or cos.shape != sin.shape:
        fail("rope", "wants float32 tables [max_pos, D/2]", cos=cos, sin=sin)
    if cos.shape[1] * 2 != q.shape[2]:
        fail("rope", "wants tables of D/2 columns", q=q, cos=cos)
    library = native()
    if library is not None:
        num_tokens, num_heads, head_dim = q.shape
        if library.rope(
            *(q.data_ptr(), k.data_ptr(), positions.data_ptr(), cos.data_ptr(), sin.data_ptr()),
            *(num_tokens, num_heads, k.shape[1], head_dim // 2, q.stride(0), k.stride(0), cos.shape[0]),
        ):
            raise library.error()
        return
    if len(positions) and (int(positions.min()) < 0 or int(positions.max()) >= cos.shape[0]):
        fail("rope", f"positions must be from 0 to {cos.shape[0] - 1}", positions=positions)
    reference.rope(q, k, positions, cos, sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[M, 2I] -> [M, I]: silu of the first half times the second. Tolerance 1e-6 relative."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or not is_dense(gate_up):
        fail("silu_mul", "wants contiguous float32 [M, 2I]", gate_up=gate_up)
    return _gated(gate_up, 0)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """[M, 2I] -> [M, I]: gelu (tanh form) of the first half times the second. Tolerance 2e-6 relative."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or not is_dense(gate_up):
        fail("gelu_tanh_mul", "wants contiguous float32 [M, 2I]", gate_up=gate_up)
    return _gated(gate_up, 1)


def _gated(gate_up: Tensor, gelu: int) -> Tensor:
    library = native()
    if library is None:
        return reference.gelu_tanh_mul(gate_up) if gelu else reference.silu_mul(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=torch.float32)
    library.gated(gate_up.data_ptr(), out.data_ptr(), rows, width, gelu)
    return out


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Copy k, v [T, KVH, D] into caches [num_blocks, KVH, B, D].

    slots int64 [T]: token t goes to block slots[t] // B, offset slots[t] % B; -1 writes nothing.
    Raises ValueError for a slot outside of the cache; no token is written then.
    """
    if not is_heads(k) or not is_heads(v) or k.shape != v.shape:
        fail("write_kv", "wants float32 k, v [T, KVH, D] with dense heads", k=k, v=v)
    if not is_dense(k_cache) or not is_dense(v_cache) or k_cache.dim() != 4 or k_cache.shape != v_cache.shape:
        fail("write_kv", "wants float32 caches [num_blocks, KVH, B, D]", k_cache=k_cache, v_cache=v_cache)
    if k_cache.shape[1] != k.shape[1] or k_cache.shape[3] != k.shape[2]:
        fail("write_kv", "heads of k and the cache differ", k=k, k_cache=k_cache)
    if not is_dense(slots, torch.int64) or slots.shape != k.shape[:1]:
        fail("write_kv", "wants int64 slots [T]", k=k, slots=slots)
    library = native()
    if library is not None:
        num_tokens, num_heads, head_dim = k.shape
        if library.write_kv(
            *(k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), slots.data_ptr()),
            *(num_tokens, num_heads, head_dim, k.stride(0), v.stride(0), k_cache.shape[0], k_cache.shape[2]),
        ):
            raise library.error()
        return
    num_slots = k_cache.shape[0] * k_cache.shape[2]
    if len(slots) and (int(slots.min()) < -1 or int(slots.max()) >= num_slots):
        fail("write_kv", f"slots must be from -1 to {num_slots - 1}", slots=slots)
    reference.write_kv(k, v, k_cache, v_cache, slots)
