"""The remote-cache loader's shell, and its port to the store.

Receives  `LoadPrefix`, `CancelLoad` and `ResetPools` from the scheduler; `PrefixBlockNumber`,
          `RemoteBlocksAllocated`, `RemoteLoadingConfirmed`, `RemoteCallRefused`, `BlocksFilled` and
          `BlocksHeld` from the block allocator; `StagingCopied` from the device executor; `StoreFound`,
          `StoreFetched` and `StoreSaved` from its own port; its timer, for deadlines and probes.
Sends     `PrefixLoaded` to the scheduler; the calls of remote loading, `HoldBlocks` and `ReleaseHeldBlocks`
          to the block allocator; `CopyFromStaging` and `CopyToStaging` to the device executor; orders to
          the store.
Owns      the slots of staging memory, and what is known of the store: its speed, its contents, its health.
Never     makes a step or a request wait for a store that does not answer; touches a slot that the worker
          has.
If it fails  the generation ends: see `ksana.runtime.supervisor`. A store that fails is no failure of it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

import trio

from ksana.devices.staging import StagingMemory
from ksana.errors import InvariantViolated, RemoteCacheError
from ksana.loading.activation import Said
from ksana.loading.remote_cache_loader import RemoteCacheLoader
from ksana.messages.base import Message
from ksana.messages.stores import (
    ItemResult,
    StoredBlock,
    StoreFetch,
    StoreFetched,
    StoreFind,
    StoreFound,
    StoreSave,
    StoreSaved,
)
from ksana.runtime.actor import Address, Post, Tap, run_actor
from ksana.runtime.clock import now_s
from ksana.runtime.mailbox import Mailbox
from ksana.stores.envelope import DamagedValue, KeyFault
from ksana.stores.store import Store

log = logging.getLogger(__name__)

FETCHES_AT_A_TIME = 4
"""As many as one load may have out; of `LoaderSettings.blocks_per_fetch` blocks each."""

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class StorePort:
    """Carries out orders, each in a task of its own that ends at the deadline, whatever the store does.

    A store that was cancelled does not touch a slot any more (`ksana.stores.store.Store`), so with its
    answer a slot is free. Fetches beyond `FETCHES_AT_A_TIME` wait here rather than in the store, and their
    timeouts run from their turn: else a crowd would blame the store for its own queue. There are never more
    tasks than the loader has orders out.
    """

    def __init__(self, store: Store, staging: StagingMemory, reply: Post, nursery: trio.Nursery) -> None:
        self._store, self._staging, self._reply, self._nursery = store, staging, reply, nursery
        self._fetching = trio.Semaphore(FETCHES_AT_A_TIME)

    def post(self, message: Message) -> None:
        if isinstance(message, StoreFind):
            self._nursery.start_soon(self._find, message)
        elif isinstance(message, StoreFetch):
            self._nursery.start_soon(self._fetch, message)
        elif isinstance(message, StoreSave):
            self._nursery.start_soon(self._save, message)
        else:
            raise InvariantViolated(f"a store port does not understand {type(message).__name__}")

    async def _find(self, order: StoreFind) -> None:
        began_s, found, error = now_s(), tuple[bool, ...](), None
        with trio.move_on_at(order.deadline_s) as scope:
            try:
                found = tuple(await self._store.contains(order.keys))
                if len(found) != len(order.keys):
                    found, error = (), f"{len(found)} answers to {len(order.keys)} keys"
            except Exception as raised:
                error = _told(raised)
        if scope.cancelled_caught:
            error = _too_late(order.deadline_s - began_s)
        self._reply(
            StoreFound(
                op_id=order.op_id,
                found=found,
                seconds=now_s() - began_s,
                error=error,
                timed_out=scope.cancelled_caught,
            )
        )

    async def _fetch(self, order: StoreFetch) -> None:
        outcome, seconds = await self._in_turn(order)
        self._reply(
            StoreFetched(
                op_id=order.op_id,
                results=tuple(outcome.results),
                seconds=seconds,
                error=outcome.error,
                timed_out=outcome.timed_out,
            )
        )

    async def _in_turn(self, order: StoreFetch) -> tuple[_Outcome, float]:
        """What became of a fetch, and how long it took once its turn had come."""
        ordered_s = now_s()
        with trio.move_on_at(order.deadline_s) as waiting:
            await self._fetching.acquire()
        if waiting.cancelled_caught:
            outcome = _Outcome(len(order.blocks))
            outcome.timed_out = True
            outcome.error = f"other fetches took all of {order.deadline_s - ordered_s:.2f} s"
            return outcome, 0.0
        try:
            began_s, deadline_s = now_s(), order.deadline_s
            if order.timeout_s is not None:
                deadline_s = min(deadline_s, began_s + order.timeout_s)
            outcome = await self._each(order.blocks, deadline_s, self._get)
            return outcome, now_s() - began_s
        finally:
            self._fetching.release()

    async def _save(self, order: StoreSave) -> None:
        began_s = now_s()
        outcome = await self._each(order.blocks, order.deadline_s, self._put)
        self._reply(
            StoreSaved(
                op_id=order.op_id,
                results=tuple(outcome.results),
                seconds=now_s() - began_s,
                error=outcome.error,
                timed_out=outcome.timed_out,
            )
        )

    async def _each(self, blocks: Sequence[StoredBlock], deadline_s: float, do: _Do) -> _Outcome:
        """Do something with every block, all at once, until the deadline."""
        began_s = now_s()
        outcome = _Outcome(len(blocks))

        async def one(at: int, block: StoredBlock) -> None:
            try:
                outcome.results[at] = await do(block)
            except Exception as raised:
                outcome.results[at] = _result_of(raised)
                if outcome.error is None or outcome.results[at] == "failed":  # which says most
                    outcome.error = _told(raised)

        with trio.move_on_at(deadline_s) as scope:
            async with trio.open_nursery() as nursery:
                for at, block in enumerate(blocks):
                    nursery.start_soon(one, at, block)
        if scope.cancelled_caught:
            outcome.timed_out = True
            outcome.error = outcome.error or _too_late(deadline_s - began_s)
        return outcome

    async def _get(self, block: StoredBlock) -> ItemResult:
        there = await self._store.get(block.key, self._staging.slot(block.slot, block.num_bytes))
        return "ok" if there else "missing"

    async def _put(self, block: StoredBlock) -> ItemResult:
        await self._store.put(block.key, self._staging.slot(block.slot, block.num_bytes))
        return "ok"


class _Outcome:
    """What became of an order; blocks that nothing came of have failed."""

    def __init__(self, num_blocks: int) -> None:
        self.results: list[ItemResult] = ["failed"] * num_blocks
        self.error: str | None = None
        self.timed_out = False


_Do = Callable[[StoredBlock], Awaitable[ItemResult]]


def _result_of(error: Exception) -> ItemResult:
    if isinstance(error, DamagedValue):
        return "corrupt"
    return "unusable" if isinstance(error, KeyFault) else "failed"


def _told(error: Exception) -> str:
    """In words. A store promises to raise nothing but RemoteCacheError; if it does, that is a bug of it, but
    none that a request should suffer for."""
    if isinstance(error, RemoteCacheError):
        return str(error)
    log.error("a bug in the remote cache store", exc_info=error)
    return f"{type(error).__name__}: {error}"


def _too_late(seconds: float) -> str:
    return f"the remote cache did not answer in {seconds:.2f} s"


class _Logged:
    """The core, and a line in the log for each of its events."""

    def __init__(self, core: RemoteCacheLoader) -> None:
        self._core = core

    def handle(self, now_s: float, messages: Sequence[Message]) -> list[Said]:
        said = self._core.handle(now_s, messages)
        for event in self._core.take_events():
            log.log(_LEVELS[event.level], "%s", event.text)
        return said

    def next_timer_s(self) -> float | None:
        return self._core.next_timer_s()


async def run_remote_cache_loader(
    core: RemoteCacheLoader,
    mailbox: Mailbox[Message],
    *,
    store: Store,
    staging: StagingMemory,
    scheduler: Post,
    block_allocator: Post,
    executor: Post,
    tap: Tap | None = None,
) -> None:
    """Run the loader until its mailbox is closed; what the store is doing then is cancelled.

    The mailbox gets one answer for each order to the store besides what the other actors send. The store
    is neither opened nor closed here.
    """
    async with trio.open_nursery() as nursery:
        port = StorePort(store, staging, mailbox.put, nursery)
        post: dict[Address, Post] = {
            "scheduler": scheduler,
            "block_allocator": block_allocator,
            "executor": executor,
            "store": port.post,
        }
        await run_actor("remote_cache_loader", _Logged(core), mailbox, post, tap)
        nursery.cancel_scope.cancel()
