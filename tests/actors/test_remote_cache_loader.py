"""The loader's shell with a simulated store on virtual time: whatever the store does, there is an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import trio

from ksana.actors.remote_cache_loader import StorePort, run_remote_cache_loader
from ksana.cache.chain_keys import chain_keys, root_key
from ksana.devices.staging import StagingMemory
from ksana.errors import InvariantViolated, RemoteCacheError
from ksana.loading.remote_cache_loader import RemoteCacheLoader
from ksana.loading.settings import LoaderSettings
from ksana.messages.base import Message
from ksana.messages.blocks import NO_BLOCK, ResetPools
from ksana.messages.remote import (
    BlocksFilled,
    BlocksHeld,
    ConfirmRemoteCacheLoadingResult,
    FilledBlock,
    GetRequestPrefixBlockNumberBeforeRemoteCacheLoading,
    HeldBlock,
    HoldBlocks,
    LoadPrefix,
    PrefixBlockNumber,
    PrefixLoaded,
    ReleaseHeldBlocks,
    RemoteBlocksAllocated,
    RemoteLoadingConfirmed,
)
from ksana.messages.staging import CopyFromStaging, CopyToStaging, StagingCopied
from ksana.messages.stores import (
    StoredBlock,
    StoreFetch,
    StoreFetched,
    StoreFind,
    StoreFound,
    StoreSave,
    StoreSaved,
)
from ksana.messages.swa import FaBlock
from ksana.runtime.mailbox import Mailbox
from ksana.runtime.virtual_clock import VirtualClock
from ksana.stores.envelope import KeyFault
from ksana.stores.simulated import SimulatedStore
from ksana.stores.store import Store

SLOT_BYTES = 64


class Port:
    """A store port, its staging memory and what it has answered."""

    def __init__(self, store: Store, nursery: trio.Nursery) -> None:
        self.staging = StagingMemory.create(8, SLOT_BYTES)
        self._put, self._answers = trio.open_memory_channel[Message](20)
        self._port = StorePort(store, self.staging, self._put.send_nowait, nursery)

    def post(self, order: Message) -> None:
        self._port.post(order)

    async def answer(self) -> Any:
        return await self._answers.receive()

    async def ask(self, order: Message) -> Message:
        self.post(order)
        return await self._answers.receive()

    def blocks(self, *names: str) -> tuple[StoredBlock, ...]:
        return tuple(StoredBlock(key=n.encode(), slot=i, num_bytes=SLOT_BYTES) for i, n in enumerate(names))

    def fill(self, slot: int, letter: bytes) -> None:
        self.staging.slot(slot, SLOT_BYTES)[:] = letter * SLOT_BYTES


def run(script: Callable[[Port], Awaitable[None]], store: Callable[[], Store]) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await script(Port(store(), nursery))
            nursery.cancel_scope.cancel()

    trio.run(main, clock=VirtualClock())


def deadline(seconds: float = 1.0) -> float:
    return trio.current_time() + seconds


def test_orders_are_carried_out() -> None:
    async def script(port: Port) -> None:
        port.fill(0, b"a")
        port.fill(1, b"b")
        saved = await port.ask(StoreSave(op_id=1, blocks=port.blocks("a", "b"), deadline_s=deadline()))
        assert isinstance(saved, StoreSaved)
        assert (saved.op_id, saved.results, saved.error, saved.timed_out) == (1, ("ok", "ok"), None, False)
        found = await port.ask(StoreFind(op_id=2, keys=(b"b", b"c", b"a"), deadline_s=deadline()))
        assert isinstance(found, StoreFound)
        assert found.found == (True, False, True)
        assert 0.0005 < found.seconds < 0.01
        fetched = await port.ask(StoreFetch(op_id=3, blocks=port.blocks("b", "c"), deadline_s=deadline()))
        assert isinstance(fetched, StoreFetched)
        assert (fetched.results, fetched.error) == (("ok", "missing"), None)
        assert bytes(port.staging.slot(0, SLOT_BYTES)) == b"b" * SLOT_BYTES

    run(script, lambda: SimulatedStore(1))


class PartlyUnusable(SimulatedStore):
    """Some keys have something in their places; the whole may be full."""

    unusable = frozenset({b"a", b"c"})
    is_full = False

    async def get(self, key: bytes, into: memoryview) -> bool:
        if key in self.unusable:
            raise KeyFault(f"{key.decode()} is a directory")
        return await super().get(key, into)

    async def put(self, key: bytes, data: memoryview) -> None:
        if key in self.unusable:
            raise KeyFault(f"{key.decode()} is a directory")
        if self.is_full:
            raise RemoteCacheError("disk full")
        await super().put(key, data)


def test_a_fault_of_one_key_is_told_apart_from_one_of_the_store() -> None:
    store = PartlyUnusable(1)

    async def script(port: Port) -> None:
        for order in (
            StoreSave(op_id=1, blocks=port.blocks("a", "b", "c"), deadline_s=deadline()),
            StoreFetch(op_id=2, blocks=port.blocks("a", "b", "c"), deadline_s=deadline()),
        ):
            answer = await port.ask(order)
            assert isinstance(answer, StoreFetched | StoreSaved)
            assert answer.results == ("unusable", "ok", "unusable")
            assert "is a directory" in str(answer.error)
        store.is_full = True
        answer = await port.ask(StoreSave(op_id=3, blocks=port.blocks("a", "b"), deadline_s=deadline()))
        assert isinstance(answer, StoreSaved)
        assert (answer.results, answer.error) == (("unusable", "failed"), "disk full")

    run(script, lambda: store)


def test_damage_and_trouble_are_told_apart() -> None:
    simulated = SimulatedStore(1)

    async def script(port: Port) -> None:
        await port.ask(StoreSave(op_id=1, blocks=port.blocks("a", "b"), deadline_s=deadline()))
        simulated.faults.corrupt_share = 1.0
        fetched = await port.ask(StoreFetch(op_id=2, blocks=port.blocks("a", "c"), deadline_s=deadline()))
        assert isinstance(fetched, StoreFetched)
        assert fetched.results == ("corrupt", "missing")
        assert fetched.error is not None
        simulated.faults.down = True
        for order in (
            StoreFetch(op_id=3, blocks=port.blocks("b"), deadline_s=deadline()),
            StoreSave(op_id=4, blocks=port.blocks("b"), deadline_s=deadline()),
        ):
            answer = await port.ask(order)
            assert isinstance(answer, StoreFetched | StoreSaved)
            assert (answer.results, answer.timed_out) == (("failed",), False)
            assert "down" in str(answer.error)
        found = await port.ask(StoreFind(op_id=5, keys=(b"a",), deadline_s=deadline()))
        assert isinstance(found, StoreFound)
        assert found.found == ()
        assert "down" in str(found.error)

    run(script, lambda: simulated)


def test_a_frozen_store_is_answered_for_at_the_deadline_and_does_not_touch_slots_later() -> None:
    simulated = SimulatedStore(1)

    async def script(port: Port) -> None:
        port.fill(0, b"a")
        await port.ask(StoreSave(op_id=1, blocks=port.blocks("a"), deadline_s=deadline()))
        port.fill(0, b"x")
        simulated.freeze()
        began_s = trio.current_time()
        for order in (
            StoreFetch(op_id=2, blocks=port.blocks("a"), deadline_s=deadline(2)),
            StoreFind(op_id=3, keys=(b"a",), deadline_s=deadline(4)),
            StoreSave(op_id=4, blocks=port.blocks("a"), deadline_s=deadline(6)),
        ):
            answer = await port.ask(order)
            assert isinstance(answer, StoreFetched | StoreFound | StoreSaved)
            assert answer.timed_out
            assert "did not answer" in str(answer.error)
        assert trio.current_time() == pytest.approx(began_s + 6)
        simulated.thaw()
        await trio.sleep(100)
        assert bytes(port.staging.slot(0, SLOT_BYTES)) == b"x" * SLOT_BYTES

    run(script, lambda: simulated)


def test_what_came_before_the_deadline_counts() -> None:
    class HalfFrozen(SimulatedStore):
        async def get(self, key: bytes, into: memoryview) -> bool:
            if key == b"slow":
                await trio.sleep_forever()
            return await super().get(key, into)

    async def script(port: Port) -> None:
        await port.ask(StoreSave(op_id=1, blocks=port.blocks("a", "slow"), deadline_s=deadline()))
        fetched = await port.ask(StoreFetch(op_id=2, blocks=port.blocks("slow", "a"), deadline_s=deadline()))
        assert isinstance(fetched, StoreFetched)
        assert (fetched.results, fetched.timed_out) == (("failed", "ok"), True)

    run(script, lambda: HalfFrozen(1))


def test_the_timeout_of_a_fetch_runs_from_its_turn() -> None:
    class OneByOne(SimulatedStore):
        """A good store with one reader, which takes a second for a value."""

        async def get(self, key: bytes, into: memoryview) -> bool:
            async with reader:
                await trio.sleep(1.0)
                return await super().get(key, into)

    reader = trio.Lock()

    async def script(port: Port) -> None:
        await port.ask(StoreSave(op_id=1, blocks=port.blocks("a"), deadline_s=deadline()))
        (block,) = port.blocks("a")
        orders = [
            StoreFetch(op_id=10 + i, blocks=(block,), deadline_s=deadline(10.5), timeout_s=4.5)
            for i in range(12)
        ]
        for order in orders:
            port.post(order)
        answers = [await port.answer() for _ in orders]
        assert all(isinstance(answer, StoreFetched) for answer in answers)
        came = [answer for answer in answers if answer.results == ("ok",)]
        assert len(came) == 10, "all that fit into the deadline, though each timeout is 4.5 s"
        assert all(answer.timed_out for answer in answers if answer.results != ("ok",))

    run(script, lambda: OneByOne(1))


def test_a_fetch_whose_turn_never_comes_took_no_time() -> None:
    simulated = SimulatedStore(1)

    async def script(port: Port) -> None:
        simulated.freeze()
        for op_id in range(5):
            port.post(StoreFetch(op_id=op_id, blocks=port.blocks("a"), deadline_s=deadline(), timeout_s=9.0))
        answers = {answer.op_id: answer for answer in [await port.answer() for _ in range(5)]}
        assert all(answer.timed_out and answer.results == ("failed",) for answer in answers.values())
        assert sorted(round(answer.seconds, 3) for answer in answers.values()) == [0.0, 1.0, 1.0, 1.0, 1.0]

    run(script, lambda: simulated)


class Broken:
    """A store that keeps none of its promises."""

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:  # noqa: ARG002
        return [True]

    async def get(self, key: bytes, into: memoryview) -> bool:  # noqa: ARG002
        raise ValueError("a bug")

    async def put(self, key: bytes, data: memoryview) -> None:  # noqa: ARG002
        raise RemoteCacheError("full")

    async def aclose(self) -> None:
        pass


def test_a_store_with_bugs_is_a_store_with_faults(caplog: pytest.LogCaptureFixture) -> None:
    async def script(port: Port) -> None:
        found = await port.ask(StoreFind(op_id=1, keys=(b"a", b"b"), deadline_s=deadline()))
        assert isinstance(found, StoreFound)
        assert (found.found, found.error) == ((), "1 answers to 2 keys")
        fetched = await port.ask(StoreFetch(op_id=2, blocks=port.blocks("a"), deadline_s=deadline()))
        assert isinstance(fetched, StoreFetched)
        assert (fetched.results, fetched.error) == (("failed",), "ValueError: a bug")

    run(script, Broken)
    assert "a bug in the remote cache store" in caplog.text


def test_a_port_understands_only_orders() -> None:
    async def script(port: Port) -> None:
        with pytest.raises(InvariantViolated, match="StoreFound"):
            await port.ask(StoreFound(op_id=1, found=(), seconds=0.0))

    run(script, lambda: SimulatedStore(1))


class Bench:
    """The whole actor; allocator and worker do at once what they are told."""

    def __init__(self, store: Store) -> None:
        settings = LoaderSettings(
            identity=b"m", block_size=4, fa_block_bytes=SLOT_BYTES, num_slots=8, blocks_per_fetch=2
        )
        self.core = RemoteCacheLoader(settings)
        self.store = store
        self.staging = StagingMemory.create(8, SLOT_BYTES)
        self.mailbox: Mailbox[Message] = Mailbox("remote_cache_loader", 1000)
        self.pool = {block_id: bytes([block_id]) * SLOT_BYTES for block_id in range(20)}
        self.loaded: list[PrefixLoaded] = []
        self.num_held = 0
        self.num_taps = 0

    async def run(self) -> None:
        await run_remote_cache_loader(
            self.core,
            self.mailbox,
            store=self.store,
            staging=self.staging,
            scheduler=self._scheduler,
            block_allocator=self._allocator,
            executor=self._executor,
            tap=self._tap,
        )

    def load(self, num_blocks: int) -> None:
        self.mailbox.put(
            LoadPrefix(
                pool_epoch=1,
                request_id=1,
                token_ids=tuple(range(4 * num_blocks + 1)),
                cache_salt="",
                num_reserved_tokens=100,
                give_up_at_s=trio.current_time() + 5,
                prefill_tokens_per_s=0.0,
            )
        )

    def fill(self, num_blocks: int) -> None:
        keys = chain_keys(root_key(b"m", ""), range(4 * num_blocks), 4)
        blocks = tuple(
            FilledBlock(block=FaBlock(fa_block_id=i, generation=0), chain_key=key, index=i)
            for i, key in enumerate(keys)
        )
        self.mailbox.put(BlocksFilled(pool_epoch=1, blocks=blocks))

    def _tap(self, *_args: object) -> None:
        self.num_taps += 1

    def _scheduler(self, message: Message) -> None:
        assert isinstance(message, PrefixLoaded)
        self.loaded.append(message)

    def _allocator(self, message: Message) -> None:
        if isinstance(message, GetRequestPrefixBlockNumberBeforeRemoteCacheLoading):
            answer: Message = PrefixBlockNumber(pool_epoch=1, request_id=1, fa_block_num=0, swa_block_num=0)
        elif isinstance(message, ConfirmRemoteCacheLoadingResult):
            self.confirmed = message.matched_block_index
            answer = RemoteLoadingConfirmed(
                pool_epoch=1, request_id=1, cached_blocks=self.confirmed, num_remote_blocks=self.confirmed
            )
        elif isinstance(message, HoldBlocks):
            self.num_held += len(message.blocks)
            answer = BlocksHeld(
                pool_epoch=1,
                hold_id=message.hold_id,
                held=tuple(HeldBlock(block=block, swa_block_id=NO_BLOCK) for block in message.blocks),
            )
        elif isinstance(message, ReleaseHeldBlocks):
            self.num_held = 0
            return
        else:
            num = message.fa_block_num  # type: ignore[attr-defined]
            ids = tuple(range(10, 10 + num))
            answer = RemoteBlocksAllocated(pool_epoch=1, request_id=1, fa_block_ids=ids, swa_block_ids=())
        self.mailbox.put(answer)

    def _executor(self, message: Message) -> None:
        assert isinstance(message, CopyFromStaging | CopyToStaging)
        for block in message.blocks:
            slot = self.staging.slot(block.slot, SLOT_BYTES)
            if isinstance(message, CopyFromStaging):
                self.pool[block.block_id] = bytes(slot)
            else:
                slot[:] = self.pool[block.block_id]
        self.mailbox.put(StagingCopied(pool_epoch=1, copy_id=message.copy_id))


def test_blocks_written_back_are_loaded_again(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        store = SimulatedStore(3)
        b = Bench(store)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(b.run)
            b.mailbox.put(ResetPools(pool_epoch=1))
            b.fill(7)
            await trio.sleep(1)
            assert (b.core.status().num_saved_blocks, b.num_held, len(store.values)) == (7, 0, 7)
            b.load(9)
            await trio.sleep(1)
            (loaded,) = b.loaded
            assert (loaded.outcome, loaded.num_remote_tokens, b.confirmed) == ("loaded", 28, 7)
            assert [b.pool[10 + i] for i in range(7)] == [b.pool[i] for i in range(7)]

            store.freeze()
            began_s = trio.current_time()
            b.load(9)
            await trio.sleep(1.01)  # one deadline of a find
            assert b.loaded[1].outcome == "store_failed"
            b.load(9)
            await trio.sleep(0.001)
            assert b.loaded[2].outcome == "store_failed"
            store.thaw()
            await trio.sleep(10)
            b.load(9)
            await trio.sleep(1)
            assert b.loaded[3].outcome == "loaded"
            assert trio.current_time() < began_s + 13
            b.mailbox.close()
        assert b.num_taps > 0
        b.core.check()

    trio.run(main, clock=VirtualClock())
    assert "is not used until it answers again" in caplog.text


def test_it_ends_with_its_mailbox_even_while_the_store_is_frozen() -> None:
    async def main() -> None:
        store = SimulatedStore(3)
        store.freeze()
        b = Bench(store)
        b.mailbox.put(ResetPools(pool_epoch=1))
        b.load(3)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(b.run)
            await trio.sleep(0.1)
            b.mailbox.close()
        assert trio.current_time() < 1

    trio.run(main, clock=VirtualClock())
