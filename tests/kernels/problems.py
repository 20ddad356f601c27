"""Random paged attention problems."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ksana import kernels


@dataclass
class Problem:
    """Arguments of paged_attention; `row(...)` cuts out some tokens of one row as a problem of its own."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    query_starts: Tensor
    positions: Tensor
    window: int | None

    def run(self, attention: Callable[..., Tensor] = kernels.paged_attention) -> Tensor:
        return attention(
            *(self.q, self.k_cache, self.v_cache, self.block_tables, self.query_starts, self.positions),
            self.q.shape[2] ** -0.5,
            self.window,
        )

    def part(self, row: int, start: int, stop: int) -> Problem:
        """Tokens [start, stop) of a row, alone."""
        first = int(self.query_starts[row])
        return Problem(
            self.q[first + start : first + stop].contiguous(),
            self.k_cache,
            self.v_cache,
            self.block_tables[row : row + 1].contiguous(),
            torch.tensor([0, stop - start], dtype=torch.int32),
            self.positions[first + start : first + stop].contiguous(),
            self.window,
        )

    def with_block_size(self, block_size: int) -> Problem:
        """The same keys and values in blocks of another size, at other places."""
        num_rows, old = len(self.block_tables), self.k_cache.shape[2]
        length = self.block_tables.shape[1] * old
        per_row = -(-length // block_size)
        places = torch.randperm(num_rows * per_row)
        tables = places.view(num_rows, per_row).to(torch.int32)
        shape = (num_rows * per_row, self.k_cache.shape[1], block_size, self.k_cache.shape[3])
        caches = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
        for row in range(num_rows):
            for j in range(length):
                block = int(self.block_tables[row, j // old])
                if block >= 0:
                    to = (int(tables[row, j // block_size]), slice(None), j % block_size)
                    caches[0][to] = self.k_cache[block, :, j % old]
                    caches[1][to] = self.v_cache[block, :, j % old]
        return Problem(self.q, *caches, tables, self.query_starts, self.positions, self.window)


def make_problem(
    rows: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 32,
    block_size: int = 16,
    window: int | None = None,
    seed: int = 0,
) -> Problem:
    """`rows`: (keys, query tokens) of each; the queries are the last tokens. Blocks that no query sees are -1
    in the table; everything in the cache that no query sees is NaN."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    max_blocks = max(-(-length // block_size) for length, _ in rows) + 1
    num_blocks = sum(-(-length // block_size) for length, _ in rows) + 3
    free = list(range(num_blocks))
    rng.shuffle(free)
    shape = (num_blocks, kv_heads, block_size, dim)
    k_cache, v_cache = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
    tables = torch.full((len(rows), max_blocks), -1, dtype=torch.int32)
    starts, positions = [0], []
    for row, (length, num_queries) in enumerate(rows):
        first_seen = 0 if window is None else max(0, length - num_queries - window + 1)
        for j in range(first_seen, length):
            if tables[row, j // block_size] < 0:
                tables[row, j // block_size] = free.pop()
            block = int(tables[row, j // block_size])
            k_cache[block, :, j % block_size] = torch.randn(kv_heads, dim, generator=generator)
            v_cache[block, :, j % block_size] = torch.randn(kv_heads, dim, generator=generator)
        starts.append(starts[-1] + num_queries)
        positions += range(length - num_queries, length)
    q = torch.randn(starts[-1], heads, dim, generator=generator)
    return Problem(
        *(q, k_cache, v_cache, tables, torch.tensor(starts, dtype=torch.int32), torch.tensor(positions)),
        window,
    )
