"""Staging memory: where KV bytes lie between a store and the pools. Shared by engine and worker.

It is cut into slots of equal size, each large enough for one block of either pool. A slot holds the
block's bytes layer by layer, keys before values, each [kv_heads, block_size, head_dim].
The loader owns the slots; the worker touches one only between the frame that names it and its answer.
The worker takes these frames in order with the steps, so a step sees what was copied before it.
"""

from __future__ import annotations

from typing import Literal

from ksana.messages.base import Message, PoolEpoch, Value


class StagedBlock(Value):
    pool: Literal["fa", "swa"]
    block_id: int
    slot: int


class CopyFromStaging(Message):
    """loader -> executor -> worker. Copy verified slots into pool blocks. Answered by StagingCopied."""

    pool_epoch: PoolEpoch
    copy_id: int
    blocks: tuple[StagedBlock, ...]


class CopyToStaging(Message):
    """loader -> executor -> worker. Copy pool blocks into slots. Answered by StagingCopied."""

    pool_epoch: PoolEpoch
    copy_id: int
    blocks: tuple[StagedBlock, ...]


class StagingCopied(Message):
    """worker -> executor -> loader. No answer comes after the epoch's worker is lost."""

    pool_epoch: PoolEpoch
    copy_id: int
