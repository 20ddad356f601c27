"""What a model is given at each step, and the memory its keys and values live in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ksana.models.spec import LayerKind, ModelSpec


@dataclass(slots=True)
class AttentionTables:
    """Where the rows of a step keep their keys and values in one pool."""

    block_tables: Tensor
    """int32 [R, max_blocks]: block of row r's positions b * B .. b * B + B - 1; -1 where it is not needed."""
    slots: Tensor
    """int64 [T]: where each token of the step is written, block * B + offset; -1 writes nothing."""


@dataclass(slots=True)
class StepBatch:
    """One step: T tokens of R rows, laid one after the other."""

    token_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T], absolute within each row's sequence."""
    query_starts: Tensor
    """int32 [R + 1]: row r's tokens are query_starts[r]:query_starts[r + 1]."""
    full: AttentionTables | None
    """For full layers; None if the model has none."""
    sliding: AttentionTables | None
    """For sliding layers; None if the model has none."""
    logit_indices: Tensor
    """int64 [L]: the tokens whose logits are wanted."""


@dataclass(slots=True)
class KvCache:
    """Keys and values per layer, each [num_blocks, num_kv_heads, block_size, head_dim] float32."""

    keys: list[Tensor]
    values: list[Tensor]
    block_size: int

    @staticmethod
    def allocate(spec: ModelSpec, num_fa_blocks: int, num_swa_blocks: int, block_size: int) -> KvCache:
        """Zeroed pools: `num_fa_blocks` for every full layer, `num_swa_blocks` for every sliding one.

        Bytes: blocks * block_size * spec.kv_bytes_per_token(kind, 4), summed over both kinds.
        """
        num_blocks: dict[LayerKind, int] = {"full": num_fa_blocks, "sliding": num_swa_blocks}
        shapes = [
            (num_blocks[kind], spec.num_kv_heads, block_size, spec.head_dim) for kind in spec.layer_kinds
        ]
        return KvCache(
            keys=[torch.zeros(shape) for shape in shapes],
            values=[torch.zeros(shape) for shape in shapes],
            block_size=block_size,
        )
