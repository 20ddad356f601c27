"""Plain-torch definitions of every kernel: the native ones are tested against them.

They also run where there is no C compiler. They favour clearness over speed. A row's result still depends
on nothing but that row: products are done in row tiles of one fixed shape, and attention one query token at a
time, over the keys that token sees.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS_PER_PRODUCT = 8
"""Rows given to one library product. A library picks its summation order by shape, so the shape is fixed."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N]: [M, N]."""
    num_rows, k = x.shape
    out = x.new_empty(num_rows, weight.shape[0])
    tile = x.new_zeros(ROWS_PER_PRODUCT, k)
    for start in range(0, num_rows, ROWS_PER_PRODUCT):
        rows = x[start : start + ROWS_PER_PRODUCT]
        tile[: len(rows)] = rows
        out[start : start + len(rows)] = F.linear(tile, weight)[: len(rows)]
    return out if bias is None else out.add_(bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float, add_one: bool) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; Gemma stores weight - 1 (add_one)."""
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * scale * (weight + 1.0 if add_one else weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, add_one: bool) -> Tensor:
    """residual += x, then the norm of it."""
    residual.add_(x)
    return rms_norm(residual, weight, eps, add_one)


def rope(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate pairs (i, i + D/2) of every head of q and k by the angles of the position, in place."""
    c, s = cos[positions][:, None, :], sin[positions][:, None, :]
    for heads in (q, k):
        first, second = heads.chunk(2, dim=-1)
        rotated = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
        heads.copy_(rotated)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Token t goes to block slots[t] // B, offset slots[t] % B; slot -1 is not written."""
    block_size = k_cache.shape[2]
    kept = slots >= 0
    blocks, offsets = slots[kept] // block_size, slots[kept] % block_size
    k_cache[blocks, :, offsets] = k[kept]
    v_cache[blocks, :, offsets] = v[kept]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """Softmax attention of every query token over the keys it sees; see `ksana.kernels.paged_attention`."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    num_heads, num_kv_heads, block_size = q.shape[1], k_cache.shape[1], k_cache.shape[2]
    group = num_heads // num_kv_heads
    starts = query_starts.tolist()
    for row in range(len(starts) - 1):
        for token in range(starts[row], starts[row + 1]):
            last = int(positions[token])
            first = 0 if window is None else max(0, last - window + 1)
            first_block = first // block_size
            blocks = block_tables[row, first_block : last // block_size + 1].long()
            seen = slice(first - first_block * block_size, last + 1 - first_block * block_size)
            keys = k_cache[blocks].transpose(0, 1).flatten(1, 2)[:, seen].contiguous()
            values = v_cache[blocks].transpose(0, 1).flatten(1, 2)[:, seen].contiguous()
            queries = q[token].view(num_kv_heads, group, -1)
            scores = torch.matmul(queries, keys.transpose(1, 2)) * scale
            out[token] = torch.matmul(torch.softmax(scores, dim=-1), values).view(num_heads, -1)
    return out
