"""Attention over a paged KV cache, the same kernel for prefill and decode."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ksana.kernels import reference
from ksana.kernels.checks import fail, is_dense, is_heads
from ksana.kernels.library import native


def _check_tables(
    block_tables: Tensor,
    query_starts: Tensor,
    positions: Tensor,
    window: int | None,
    num_blocks: int,
    block_size: int,
) -> None:
    """The values, for the reference; the native kernel does this itself."""
    starts, last = query_starts.tolist(), positions.tolist()
    if starts[0] != 0 or starts[-1] != len(last) or any(a > b for a, b in itertools.pairwise(starts)):
        raise ValueError(f"paged_attention: query_starts must rise from 0 to {len(last)}: {starts}")
    for row in range(len(starts) - 1):
        for token in range(starts[row], starts[row + 1]):
            first = 0 if window is None else max(0, last[token] - window + 1)
            if not 0 <= last[token] < block_tables.shape[1] * block_size:
                raise ValueError(
                    f"paged_attention: position {last[token]} of token {token} is outside its block table"
                )
            blocks = block_tables[row, first // block_size : last[token] // block_size + 1]
            if int(blocks.min()) < 0 or int(blocks.max()) >= num_blocks:
                raise ValueError(f"paged_attention: row {row} names a block outside of 0..{num_blocks - 1}")


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
    """Causal softmax attention of q [T, H, D] over the cache; returns [T, H, D].

    k_cache, v_cache [num_blocks, KVH, B, D] float32; block_tables int32 [R, max_blocks]; query_starts int32
    [R + 1]: row r's tokens are query_starts[r]:query_starts[r + 1]; positions int64 [T], absolute.
    A token at position p sees keys max(0, p - window + 1)..p (window None: all); key j of row r is at block
    block_tables[r, j // B], offset j % B. Blocks wholly outside of that are not read and may be -1.
    The bits of a token's result depend only on its query, its keys and values, p, window and scale.
    Raises ValueError for wrong shapes, for a position beyond the table, for a needed block out of range.
    Reference: `reference.paged_attention`; tolerance 2e-6 of the largest value.
    """
    if not is_heads(q):
        fail("paged_attention", "wants float32 q [T, H, D] with dense heads", q=q)
    if not is_dense(k_cache) or not is_dense(v_cache) or k_cache.dim() != 4 or k_cache.shape != v_cache.shape:
        fail(
            "paged_attention",
            "wants float32 caches [num_blocks, KVH, B, D]",
            k_cache=k_cache,
            v_cache=v_cache,
        )
    num_heads, head_dim = q.shape[1], q.shape[2]
    num_blocks, num_kv_heads, block_size, cache_dim = k_cache.shape
    if head_dim != cache_dim or head_dim % 8 or not 8 <= head_dim <= 512 or num_heads % max(num_kv_heads, 1):
        fail(
            "paged_attention", "wants D a multiple of 8 up to 512, H a multiple of KVH", q=q, k_cache=k_cache
        )
    if not is_dense(block_tables, torch.int32) or block_tables.dim() != 2:
        fail("paged_attention", "wants int32 block_tables [R, max_blocks]", block_tables=block_tables)
    if not is_dense(query_starts, torch.int32) or query_starts.shape != (block_tables.shape[0] + 1,):
        fail(
            "paged_attention",
            "wants int32 query_starts [R + 1]",
            query_starts=query_starts,
            tables=block_tables,
        )
    if not is_dense(positions, torch.int64) or positions.shape != q.shape[:1]:
        fail("paged_attention", "wants int64 positions [T]", positions=positions, q=q)
    if window is not None and window < 1:
        raise ValueError(f"paged_attention: window must be at least 1 or None, not {window}")
    library = native()
    if library is not None:
        num_tokens, num_rows = q.shape[0], block_tables.shape[0]
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=torch.float32)
        if library.paged_attention(
            *(q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), block_tables.data_ptr()),
            *(query_starts.data_ptr(), positions.data_ptr(), out.data_ptr()),
            *(num_tokens, num_rows, num_heads, num_kv_heads, head_dim, q.stride(0)),
            *(num_blocks, block_size, block_tables.shape[1], window or 0, scale),
        ):
            raise library.error()
        return out
    _check_tables(block_tables, query_starts, positions, window, num_blocks, block_size)
    return reference.paged_attention(
        q, k_cache, v_cache, block_tables, query_starts, positions, scale, window
    )
