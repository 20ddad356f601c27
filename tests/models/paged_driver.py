"""Runs a model without an engine: blocks handed out in an order of our own, prompts in chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from ksana.models.batch import AttentionTables, KvCache, StepBatch
from ksana.models.decoder import Model


class PagedDriver:
    """R sequences over one KvCache. Blocks of each row are scattered, so that tables matter."""

    def __init__(self, model: Model, num_rows: int, max_tokens: int, block_size: int = 16) -> None:
        self.model = model
        blocks_per_row = -(-max_tokens // block_size)
        num_blocks = num_rows * blocks_per_row
        self.kv = KvCache.allocate(model.spec, num_blocks, num_blocks, block_size)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
        self.tables = order.to(torch.int32).view(num_rows, blocks_per_row)
        self.block_size = block_size
        self.lengths = [0] * num_rows

    def batch(self, tokens: dict[int, list[int]], logits_of_all: bool = False) -> StepBatch:
        """The next step's batch: row to its next tokens; logits of the last token of each, or of all."""
        rows = sorted(tokens)
        counts = [len(tokens[row]) for row in rows]
        ranges = [torch.arange(self.lengths[row], self.lengths[row] + len(tokens[row])) for row in rows]
        tables = self.tables[rows]
        slots = [
            table[at // self.block_size].long() * self.block_size + at % self.block_size
            for table, at in zip(tables, ranges, strict=True)
        ]
        starts = torch.tensor([0, *counts]).cumsum(0)
        attention = AttentionTables(tables.contiguous(), torch.cat(slots))
        return StepBatch(
            token_ids=torch.tensor([token for row in rows for token in tokens[row]]),
            positions=torch.cat(ranges),
            query_starts=starts.to(torch.int32),
            full=attention,
            sliding=attention,
            logit_indices=torch.arange(int(starts[-1])) if logits_of_all else starts[1:] - 1,
        )

    def step(self, tokens: dict[int, list[int]], logits_of_all: bool = False) -> Tensor:
        """Feed each row its next tokens; logits [rows, vocab] of the last of each, or [T, vocab] of all."""
        logits = self.model.forward(self.batch(tokens, logits_of_all), self.kv)
        for row, fed in tokens.items():
            self.lengths[row] += len(fed)
        return logits

    def all_logits(self, tokens: list[int], chunk: int) -> Tensor:
        """Logits [T, vocab] of one sequence in row 0, fed in chunks."""
        pieces = [
            self.step({0: tokens[at : at + chunk]}, logits_of_all=True) for at in range(0, len(tokens), chunk)
        ]
        return torch.cat(pieces)
