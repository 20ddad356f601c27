"""The remote-cache loader: brings prefixes from a store into the pools, and filled blocks back to it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ksana.errors import InvariantViolated
from ksana.loading.activation import Activation, LoaderEvent, Said
from ksana.loading.loads import Loads
from ksana.loading.orders import StoreAnswer, StoreOrders
from ksana.loading.settings import LoaderSettings
from ksana.loading.state import LoaderState
from ksana.loading.write_back import WriteBack
from ksana.messages.base import Message, PoolEpoch
from ksana.messages.blocks import ResetPools
from ksana.messages.remote import (
    BlocksFilled,
    BlocksHeld,
    CancelLoad,
    LoadPrefix,
    PrefixBlockNumber,
    RemoteBlocksAllocated,
    RemoteCallRefused,
    RemoteLoadingConfirmed,
)
from ksana.messages.staging import StagingCopied
from ksana.messages.stores import RemoteCacheStatus, StoreFetched, StoreFound, StoreSaved

AllocatorAnswer = (
    PrefixBlockNumber | RemoteBlocksAllocated | RemoteLoadingConfirmed | RemoteCallRefused | BlocksHeld
)


class RemoteCacheLoader:
    """Core of the remote-cache loader.

    Receives  LoadPrefix, CancelLoad and ResetPools from the scheduler; answers to its calls, and
              BlocksFilled, from the block allocator; StagingCopied from the device executor; StoreFound,
              StoreFetched and StoreSaved from the store; its timer, for deadlines and probes.
    Sends     PrefixLoaded to the scheduler, exactly one for each LoadPrefix; the calls of
              `ksana.messages.remote` to the block allocator; copies to the executor; orders to the store.
    Owns      the slots of staging memory; what it knows of the store.
    Never     waits for the store; confirms a block before the worker was told to copy it; says anything to
              a store that has not answered for a while, except for a probe now and then.
    If it fails  it has raised InvariantViolated: a bug, here or in those that it talks to.
    """

    def __init__(self, settings: LoaderSettings, state: LoaderState | None = None) -> None:
        """`state`: of a loader with the same settings, to go on from."""
        if state is None:
            num_for_loads = settings.num_slots - settings.num_write_slots
            state = LoaderState(
                free_load_slots=list(range(num_for_loads)),
                free_write_slots=list(range(num_for_loads, settings.num_slots)),
            )
        self.settings = settings
        self._events: list[LoaderEvent] = []
        self._begin(state)

    def _begin(self, state: LoaderState) -> None:
        self.state = state
        self._orders = StoreOrders(self.settings, state)
        self._loads = Loads(self.settings, state, self._orders)
        self._write_back = WriteBack(self.settings, state, self._orders)

    def handle(self, now_s: float, messages: Sequence[Message]) -> list[Said]:
        out = Activation(now_s)
        for message in messages:
            self._take(out, message)
        self._orders.probe_if_due(out)
        self._loads.go_on(out)
        self._write_back.go_on(out)
        self._events += out.events
        return out.said

    def next_timer_s(self) -> float | None:
        timers = (self._orders.next_timer_s(), self._loads.next_timer_s())
        return min((timer for timer in timers if timer is not None), default=None)

    def take_events(self) -> list[LoaderEvent]:
        """What has happened since the last call that is worth a line in the log."""
        events, self._events = self._events, []
        return events

    def status(self) -> RemoteCacheStatus:
        state, counters = self.state, self.state.counters
        return RemoteCacheStatus(
            num_loads=tuple(sorted(counters.num_loads.items())),
            num_loading=len(state.loads),
            num_loaded_tokens=counters.num_loaded_tokens,
            num_loaded_blocks=counters.num_loaded_blocks,
            num_loaded_bytes=counters.num_loaded_bytes,
            num_missing_blocks=counters.num_missing_blocks,
            num_corrupt_blocks=counters.num_corrupt_blocks,
            num_unusable_blocks=counters.num_unusable_blocks,
            num_store_errors=counters.num_store_errors,
            num_store_timeouts=counters.num_store_timeouts,
            num_saved_blocks=counters.num_saved_blocks,
            num_saved_bytes=counters.num_saved_bytes,
            num_unsaved_blocks=counters.num_unsaved_blocks,
            num_queued_blocks=len(state.queue),
            num_late_answers=counters.num_late_answers,
            num_breaker_openings=state.breaker.num_openings + state.save_breaker.num_openings,
            store_ok=self._orders.allowed,
            saves_ok=self._orders.takes_saves,
        )

    def snapshot(self) -> bytes:
        """The whole state as msgpack; a loader with equal settings that restores it goes on the same."""
        return msgspec.msgpack.encode(self.state)

    def restore(self, snapshot: bytes) -> None:
        """Go on from a snapshot of a loader with the same settings. Raises msgspec.ValidationError, or
        InvariantViolated for one whose slots are not those of the settings."""
        self._begin(msgspec.msgpack.decode(snapshot, type=LoaderState))
        self.check()

    def slots(self) -> list[int]:
        """The slots of staging memory, wherever they are now."""
        state = self.state
        places = [*state.free_load_slots, *state.free_write_slots]
        for operation in state.operations.values():
            if operation.kind == "fetch" or (
                operation.kind == "save" and operation.owner not in state.batches
            ):
                places += [block.slot for block in operation.blocks]
        for slots in state.copies.values():
            places += slots
        for batch in state.batches.values():
            places += batch.slots
        return places

    def check(self) -> None:
        """Raise InvariantViolated unless every slot is in exactly one place. O(slots)."""
        places = self.slots()
        if len(places) != self.settings.num_slots or sorted(places) != list(range(len(places))):
            raise InvariantViolated(f"staging slots are lost or in two places: {sorted(places)}")

    def _take(self, out: Activation, message: Message) -> None:
        if isinstance(message, StoreFound | StoreFetched | StoreSaved):
            self._take_from_store(out, message)
        elif isinstance(message, LoadPrefix):
            self._see_epoch(out, message.pool_epoch)
            self._loads.begin(out, message)
        elif isinstance(message, CancelLoad):
            self._loads.cancel(out, message)
        elif isinstance(message, ResetPools):
            self._see_epoch(out, message.pool_epoch)
        elif isinstance(message, BlocksFilled):
            self._see_epoch(out, message.pool_epoch)
            self._write_back.filled(message)
        elif isinstance(message, StagingCopied):
            self._take_copied(out, message)
        elif isinstance(message, AllocatorAnswer):
            self._take_from_allocator(out, message)
        else:
            raise InvariantViolated(f"the loader does not understand {type(message).__name__}")

    def _take_from_store(self, out: Activation, message: StoreAnswer) -> None:
        operation = self._orders.take(out, message)
        if operation is None:
            return
        if isinstance(message, StoreFound):
            self._loads.found(out, operation, message)
        elif isinstance(message, StoreFetched):
            self._loads.fetched(out, operation, message)
        else:
            self._write_back.saved(out, operation, message)

    def _take_from_allocator(self, out: Activation, message: AllocatorAnswer) -> None:
        if message.pool_epoch != self.state.pool_epoch:
            self.state.counters.num_late_answers += 1
        elif isinstance(message, PrefixBlockNumber):
            self._loads.probed(out, message)
        elif isinstance(message, RemoteBlocksAllocated):
            self._loads.reserved(out, message)
        elif isinstance(message, RemoteLoadingConfirmed):
            self._loads.confirmed(out, message)
        elif isinstance(message, RemoteCallRefused):
            self._loads.refused(out, message)
        else:
            self._write_back.held(out, message)

    def _take_copied(self, out: Activation, message: StagingCopied) -> None:
        if message.copy_id in self.state.copies:
            self.state.free_load_slots += self.state.copies.pop(message.copy_id)
        elif message.copy_id in self.state.batch_of_copy:
            self._write_back.copied(out, message)
        else:
            self.state.counters.num_late_answers += 1

    def _see_epoch(self, out: Activation, pool_epoch: PoolEpoch) -> None:
        """A new epoch means that a new worker has empty pools: what the old one had to copy is void."""
        if pool_epoch <= self.state.pool_epoch:
            return
        self.state.pool_epoch = pool_epoch
        self._loads.reset(out)
        self._write_back.reset()
        for slots in self.state.copies.values():
            self.state.free_load_slots += slots
        self.state.copies.clear()
