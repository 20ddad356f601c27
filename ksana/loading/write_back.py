"""Writing filled blocks back to the store, in the background and in order of filling.

    queue ──> holding ──> copying ──> saving ──> done

Each batch goes this way on its own (`ksana.loading.state.SaveBatch`); no step and no load waits for it. A
queue that is full takes no more: a prefix whose first blocks are stored is worth more than its last ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ksana.loading.activation import Activation
from ksana.loading.orders import StoreOrders
from ksana.loading.settings import LoaderSettings
from ksana.loading.state import LoaderState, Operation, SaveBatch
from ksana.messages.blocks import NO_BLOCK
from ksana.messages.remote import (
    BlocksFilled,
    BlocksHeld,
    FilledBlock,
    HeldBlock,
    HoldBlocks,
    ReleaseHeldBlocks,
)
from ksana.messages.staging import CopyToStaging, StagedBlock, StagingCopied
from ksana.messages.stores import FA_KIND, SWA_KIND, StoredBlock, StoreSaved


class WriteBack:
    """The queue and the batches under way."""

    def __init__(self, settings: LoaderSettings, state: LoaderState, orders: StoreOrders) -> None:
        self._settings = settings
        self._state = state
        self._orders = orders

    def filled(self, message: BlocksFilled) -> None:
        if not self._settings.write_back or message.pool_epoch != self._state.pool_epoch:
            return
        for block in message.blocks:
            if not self._is_known(block):
                if len(self._state.queue) < self._settings.max_queued_blocks:
                    self._state.queue.append(block)
                else:
                    self._state.counters.num_unsaved_blocks += 1

    def go_on(self, out: Activation) -> None:
        """Begin what may begin now."""
        state, settings = self._state, self._settings
        if not self._orders.takes_saves:
            state.counters.num_unsaved_blocks += len(state.queue)
            state.queue.clear()
        while (
            state.queue
            and self._orders.allowed
            and len(state.batches) < settings.saves_in_flight
            and len(state.free_write_slots) >= settings.slots_per_filled_block
        ):
            room = len(state.free_write_slots) // settings.slots_per_filled_block
            self._begin(out, min(room, settings.blocks_per_save))

    def held(self, out: Activation, message: BlocksHeld) -> None:
        """Copy what is still there and not in the store."""
        batch = self._state.batches.get(message.hold_id)
        if batch is None or batch.state != "holding":
            self._state.counters.num_late_answers += 1
            return
        chain_key_of = {(f.block.fa_block_id, f.block.generation): f.chain_key for f in batch.filled}
        self._state.counters.num_unsaved_blocks += len(batch.filled) - len(message.held)
        slots = list(batch.slots)
        staged: list[StagedBlock] = []
        stored: list[StoredBlock] = []
        for held in message.held:
            chain_key = chain_key_of[held.block.fa_block_id, held.block.generation]
            for pool, block_id, key, num_bytes in self._parts(held, chain_key):
                if key not in self._orders.known_keys:
                    slot = slots.pop()
                    staged.append(StagedBlock(pool=pool, block_id=block_id, slot=slot))
                    stored.append(StoredBlock(key=key, slot=slot, num_bytes=num_bytes))
        self._state.free_write_slots += slots
        batch.blocks, batch.slots = tuple(stored), tuple(block.slot for block in stored)
        if not staged:
            self._end(out, message.hold_id)
            return
        batch.state = "copying"
        copy_id = self._state.new_id()
        self._state.batch_of_copy[copy_id] = message.hold_id
        out.executor(CopyToStaging(pool_epoch=self._state.pool_epoch, copy_id=copy_id, blocks=tuple(staged)))

    def copied(self, out: Activation, message: StagingCopied) -> None:
        """The bytes are in their slots: to the store with them."""
        hold_id = self._state.batch_of_copy.pop(message.copy_id)
        batch = self._state.batches[hold_id]
        if self._orders.allowed and self._orders.takes_saves:
            batch.state = "saving"
            self._orders.save(out, hold_id, batch.blocks)
        else:
            self._state.counters.num_unsaved_blocks += len(batch.blocks)
            self._end(out, hold_id)

    def saved(self, out: Activation, operation: Operation, message: StoreSaved) -> None:
        counters = self._state.counters
        for block, result in zip(operation.blocks, message.results, strict=True):
            if result == "ok":
                counters.num_saved_blocks += 1
                counters.num_saved_bytes += block.num_bytes
            else:
                counters.num_unsaved_blocks += 1
        if operation.owner in self._state.batches:
            self._end(out, operation.owner)
        else:  # begun before a reset
            self._state.free_write_slots += [block.slot for block in operation.blocks]

    def reset(self) -> None:
        """The pools are empty. What is in slots already can still be saved; the rest is gone."""
        state = self._state
        state.counters.num_unsaved_blocks += len(state.queue)
        state.queue.clear()
        state.batch_of_copy.clear()
        for batch in state.batches.values():
            if batch.state != "saving":
                state.counters.num_unsaved_blocks += len(batch.blocks or batch.filled)
                state.free_write_slots += batch.slots
        state.batches.clear()

    def _begin(self, out: Activation, num_blocks: int) -> None:
        state = self._state
        filled = tuple(block for block in state.queue[:num_blocks] if not self._is_known(block))
        del state.queue[:num_blocks]
        if not filled:
            return
        hold_id = state.new_id()
        num_slots = len(filled) * self._settings.slots_per_filled_block
        slots = tuple(state.free_write_slots.pop() for _ in range(num_slots))
        state.batches[hold_id] = SaveBatch(filled=filled, slots=slots)
        blocks = tuple(block.block for block in filled)
        out.allocator(HoldBlocks(pool_epoch=state.pool_epoch, hold_id=hold_id, blocks=blocks))

    def _end(self, out: Activation, hold_id: int) -> None:
        batch = self._state.batches.pop(hold_id)
        self._state.free_write_slots += batch.slots
        out.allocator(ReleaseHeldBlocks(pool_epoch=self._state.pool_epoch, hold_id=hold_id))

    def _parts(
        self, held: HeldBlock, chain_key: bytes
    ) -> Iterator[tuple[Literal["fa", "swa"], int, bytes, int]]:
        """What is to be saved of a block: pool, block id, store key, bytes."""
        if self._settings.fa_block_bytes:
            yield "fa", held.block.fa_block_id, chain_key + FA_KIND, self._settings.fa_block_bytes
        if self._settings.swa_block_bytes and held.swa_block_id != NO_BLOCK:
            yield "swa", held.swa_block_id, chain_key + SWA_KIND, self._settings.swa_block_bytes

    def _is_known(self, block: FilledBlock) -> bool:
        """Whether the store has all there is to know of this block."""
        known, settings = self._orders.known_keys, self._settings
        return (not settings.fa_block_bytes or block.chain_key + FA_KIND in known) and (
            not settings.swa_block_bytes or block.chain_key + SWA_KIND in known
        )
