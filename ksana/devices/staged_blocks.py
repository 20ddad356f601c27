"""Copies between staging slots and the KV pools, in the worker. Torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from ksana.devices.staging import StagingMemory
from ksana.errors import InvariantViolated
from ksana.messages.staging import CopyFromStaging, CopyToStaging, StagedBlock, StagingCopied
from ksana.models.batch import KvCache

Pool = Literal["fa", "swa"]


class StagedBlocks:
    """The slots as tensors beside the pools they are copied from and to.

    A block of a pool lies in its slot as [layers of the pool, 2, kv_heads, block_size, head_dim] in the
    cache's type: layer by layer, keys before values. Both directions are the same copy, so bytes survive.
    """

    def __init__(
        self, memory: StagingMemory, kv: KvCache, layers_of_pool: Mapping[str, Sequence[int]]
    ) -> None:
        """Raises InvariantViolated if a block does not fit into a slot."""
        self._memory = memory
        self._caches: dict[Pool, list[torch.Tensor]] = {}
        for pool in ("fa", "swa"):
            self._caches[pool] = [
                cache for layer in layers_of_pool[pool] for cache in (kv.keys[layer], kv.values[layer])
            ]
            if self._caches[pool]:
                self._slot(pool, 0)

    def copy(self, order: CopyFromStaging | CopyToStaging) -> StagingCopied:
        """Raises InvariantViolated, before anything is copied, if a block or slot is out of bounds."""
        for block in order.blocks:
            self._check(block)
        inward = isinstance(order, CopyFromStaging)
        for block in order.blocks:
            slot = self._slot(block.pool, block.slot)
            for part, cache in zip(slot, self._caches[block.pool], strict=True):
                if inward:
                    cache[block.block_id].copy_(part)
                else:
                    part.copy_(cache[block.block_id])
        return StagingCopied(pool_epoch=order.pool_epoch, copy_id=order.copy_id)

    def _check(self, block: StagedBlock) -> None:
        caches = self._caches[block.pool]
        num_blocks = len(caches[0]) if caches else 0
        num_slots = self._memory.area.num_slots
        if not (0 <= block.slot < num_slots and 0 <= block.block_id < num_blocks):
            raise InvariantViolated(
                f"copy between staging slot {block.slot} of {num_slots} and {block.pool} block "
                f"{block.block_id} of {num_blocks}"
            )

    def _slot(self, pool: Pool, slot: int) -> torch.Tensor:
        """The slot as [number of caches, kv_heads, block_size, head_dim], sharing its memory."""
        caches = self._caches[pool]
        num_bytes = len(caches) * caches[0][0].nbytes
        flat = torch.frombuffer(self._memory.slot(slot, num_bytes), dtype=caches[0].dtype)
        return flat.view(len(caches), *caches[0].shape[1:])
