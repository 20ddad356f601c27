"""A store behind the real remote-cache loader: staging slots and stored blocks are lists of hashes.

It answers an order when the test delivers it, with the faults that its seed decides.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ksana.cache.chain_keys import chain_keys, root_key
from ksana.loading.settings import LoaderSettings
from ksana.messages.base import Message
from ksana.messages.stores import (
    FA_KIND,
    SWA_KIND,
    ItemResult,
    StoreFetch,
    StoreFetched,
    StoreFind,
    StoreFound,
    StoreSave,
    StoreSaved,
)
from tests.scheduling.fake_loader import kv_chain

NUM_SLOTS = 12


def loader_settings(block_size: int, window_blocks: int) -> LoaderSettings:
    """For blocks that have bytes, but not many slots for them."""
    return LoaderSettings(
        identity=b"tests",
        block_size=block_size,
        fa_block_bytes=8,
        swa_block_bytes=8 if window_blocks else 0,
        window_blocks=window_blocks,
        num_slots=NUM_SLOTS,
        blocks_per_fetch=2,
        fetches_in_flight=2,
    )


class SlotStore:
    """Invariant: what a key stands for never changes."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.fault_share = self.rng.choice([0.0, 0.05, 0.5])
        self.slots: dict[int, list[int]] = {}
        self.values: dict[bytes, list[int]] = {}

    def fill(self, token_ids: Sequence[int], block_size: int) -> None:
        """Another engine has computed these tokens."""
        keys = chain_keys(root_key(b"tests", ""), token_ids, block_size)
        chain = kv_chain(token_ids)
        for index, key in enumerate(keys):
            for kind in (FA_KIND, SWA_KIND):
                self.values[key + kind] = chain[index * block_size : (index + 1) * block_size]

    def answer(self, order: Message) -> Message:
        error = "the store is broken" if self.rng.random() < self.fault_share / 4 else None
        if isinstance(order, StoreFind):
            found = () if error else tuple(key in self.values for key in order.keys)
            return StoreFound(op_id=order.op_id, found=found, seconds=0.001, error=error)
        if isinstance(order, StoreFetch):
            results: list[ItemResult] = [
                "failed" if error else self._fetch(block.key, block.slot) for block in order.blocks
            ]
            return StoreFetched(op_id=order.op_id, results=tuple(results), seconds=0.001, error=error)
        assert isinstance(order, StoreSave)
        for block in order.blocks:
            if error is None:
                assert self.values.get(block.key, self.slots[block.slot]) == self.slots[block.slot]
                self.values[block.key] = self.slots[block.slot]
        result: ItemResult = "failed" if error else "ok"
        return StoreSaved(
            op_id=order.op_id, results=(result,) * len(order.blocks), seconds=0.001, error=error
        )

    def _fetch(self, key: bytes, slot: int) -> ItemResult:
        if self.rng.random() < self.fault_share:
            self.slots[slot] = [-1]
            return self.rng.choice(("missing", "corrupt", "failed"))
        if key not in self.values:
            return "missing"
        self.slots[slot] = list(self.values[key])
        return "ok"
