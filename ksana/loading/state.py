"""All that the loader remembers between activations, as plain data that msgspec can write and read."""

from __future__ import annotations

from typing import Literal

import msgspec

from ksana.loading.breaker import BreakerState
from ksana.loading.estimate import StoreSpeed
from ksana.loading.load import Load, WantedBlock
from ksana.messages.base import PoolEpoch, RequestId
from ksana.messages.remote import FilledBlock
from ksana.messages.stores import StoredBlock


class Operation(msgspec.Struct, kw_only=True):
    """An order to the store that is not answered yet. Its slots are the store's until then."""

    kind: Literal["probe", "find", "fetch", "save"]
    owner: int = 0
    """Of a find or fetch the load, of a save the batch; they may be gone when the answer comes."""
    keys: tuple[bytes, ...] = ()
    """Of a find: what was asked for."""
    blocks: tuple[StoredBlock, ...] = ()
    """Of a fetch or save."""
    wanted: tuple[WantedBlock, ...] = ()
    """Of a fetch: what the blocks are for."""
    is_cut_short: bool = False
    """Of a find: the load ends before a store could be blamed for being late."""


class SaveBatch(msgspec.Struct, kw_only=True):
    """Some filled blocks on their way to the store. Known by its hold id.

    holding   asked the allocator to keep them
    copying   asked the worker to copy them to slots
    saving    asked the store to take them
    """

    state: Literal["holding", "copying", "saving"] = "holding"
    filled: tuple[FilledBlock, ...]
    slots: tuple[int, ...]
    """While holding: one for whatever may have to be copied. Afterwards: those of `blocks`."""
    blocks: tuple[StoredBlock, ...] = ()


class Counters(msgspec.Struct, kw_only=True):
    """See `ksana.messages.stores.RemoteCacheStatus`."""

    num_loads: dict[str, int] = {}
    num_loaded_tokens: int = 0
    num_loaded_blocks: int = 0
    num_loaded_bytes: int = 0
    num_missing_blocks: int = 0
    num_corrupt_blocks: int = 0
    num_unusable_blocks: int = 0
    num_store_errors: int = 0
    num_store_timeouts: int = 0
    num_saved_blocks: int = 0
    num_saved_bytes: int = 0
    num_unsaved_blocks: int = 0
    num_late_answers: int = 0


class LoaderState(msgspec.Struct, kw_only=True):
    """Invariant: each slot is in exactly one place: free, with an operation, in a copy, or with a batch
    (the slots of a batch that is copying or saving are counted there, not with its copy or operation)."""

    pool_epoch: PoolEpoch = -1
    last_id: int = 0
    """Loads, operations, copies and holds are numbered together."""
    loads: dict[RequestId, Load] = {}
    """In the order in which they began."""
    operations: dict[int, Operation] = {}
    copies: dict[int, tuple[int, ...]] = {}
    """Copies into the pools that the worker has not done yet: their slots."""
    batch_of_copy: dict[int, int] = {}
    """Copies out of the pools: the hold id of their batch."""
    free_load_slots: list[int] = []
    free_write_slots: list[int] = []
    queue: list[FilledBlock] = []
    """Filled blocks that are to be written back, oldest first."""
    batches: dict[int, SaveBatch] = {}
    known_keys: dict[bytes, None] = {}
    breaker: BreakerState = BreakerState()
    """Of finds and fetches."""
    save_breaker: BreakerState = BreakerState()
    speed: StoreSpeed = msgspec.field(default_factory=StoreSpeed)
    counters: Counters = msgspec.field(default_factory=Counters)

    def new_id(self) -> int:
        self.last_id += 1
        return self.last_id
