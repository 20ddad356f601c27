"""All that a loader talks to, made up: an allocator, a store and a worker that check what they are told.

Who speaks to whom and in which order is as in an engine (each sender's messages arrive in order); when
anybody acts is up to the test. Contents of slots and pool blocks are store keys, or rubbish.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from ksana.cache.window_match import last_valid_end
from ksana.loading.remote_cache_loader import RemoteCacheLoader
from ksana.loading.settings import LoaderSettings
from ksana.messages.base import Message
from ksana.messages.blocks import NO_BLOCK, ResetPools
from ksana.messages.remote import (
    AllocateBlocksForRemoteCache,
    BlocksFilled,
    BlocksHeld,
    CancelLoad,
    ConfirmRemoteCacheLoadingResult,
    DropRemoteCacheLoading,
    FilledBlock,
    GetRequestPrefixBlockNumberBeforeRemoteCacheLoading,
    HeldBlock,
    HoldBlocks,
    LoadPrefix,
    PrefixBlockNumber,
    PrefixLoaded,
    ReleaseHeldBlocks,
    RemoteBlocksAllocated,
    RemoteCallRefused,
    RemoteLoadingConfirmed,
)
from ksana.messages.staging import CopyFromStaging, CopyToStaging, StagingCopied
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
from ksana.messages.swa import FaBlock

RUBBISH = b"rubbish"
StoreOrder = StoreFind | StoreFetch | StoreSave


def settings(**changes: object) -> LoaderSettings:
    values: dict[str, object] = {
        "identity": b"model",
        "block_size": 4,
        "fa_block_bytes": 100,
        "swa_block_bytes": 0,
        "window_blocks": 0,
        "num_slots": 12,
        "blocks_per_fetch": 2,
        "fetches_in_flight": 2,
        "max_queued_blocks": 6,
        "max_known_keys": 30,
    }
    return LoaderSettings(**{**values, **changes})  # type: ignore[arg-type]


@dataclass
class Loading:
    """A request at the allocator."""

    num_tokens: int
    state: str = "probed"
    fa: int = 0
    swa_valid: tuple[bool, ...] = ()
    fa_ids: tuple[int, ...] = ()
    swa_ids: tuple[int, ...] = ()


@dataclass
class World:
    config: LoaderSettings
    seed: int = 0
    pool_size: int = 40
    epoch: int = 1
    now_s: float = 100.0
    inbox: deque[Message] = field(default_factory=deque)
    """Of the loader."""
    to_allocator: deque[Message] = field(default_factory=deque)
    to_worker: deque[CopyFromStaging | CopyToStaging] = field(default_factory=deque)
    to_store: list[StoreOrder] = field(default_factory=list)
    ended: dict[int, list[PrefixLoaded]] = field(default_factory=dict)
    num_begun: dict[int, int] = field(default_factory=dict)
    loading: dict[int, Loading] = field(default_factory=dict)
    holds: dict[int, tuple[FaBlock, ...]] = field(default_factory=dict)
    filled: dict[FaBlock, FilledBlock] = field(default_factory=dict)
    slots: dict[int, bytes] = field(default_factory=dict)
    pools: dict[tuple[str, int], bytes] = field(default_factory=dict)
    stored: set[bytes] = field(default_factory=set)
    num_copies_done: int = 0
    num_copies_said: int = 0
    owed: list[tuple[int, tuple[str, int], bytes]] = field(default_factory=list)
    """Promises of Confirms: after so many copies this block holds that key."""
    said: list[tuple[str, Message]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.core = RemoteCacheLoader(self.config)
        self.random = Random(self.seed)
        self.free = {"fa": list(range(self.pool_size)), "swa": list(range(self.pool_size))}
        self.core.handle(self.now_s, [ResetPools(pool_epoch=self.epoch)])

    # the loader

    def deliver(self, count: int = 1) -> None:
        messages = [self.inbox.popleft() for _ in range(min(count, len(self.inbox)))]
        said = self.core.handle(self.now_s, messages)
        self.core.check()
        assert self.core.handle(self.now_s, []) == [], "says more without having heard anything"
        timer = self.core.next_timer_s()
        assert timer is None or timer > self.now_s, "a timer that fires for ever"
        for address, message in said:
            self.said.append((address, message))
            getattr(self, f"_hear_{address}")(message)

    def snapshot(self) -> None:
        """Go on with what was written and read again."""
        data = self.core.snapshot()
        self.core = RemoteCacheLoader(self.config)
        self.core.restore(data)

    # the scheduler

    def load(self, request_id: int, token_ids: tuple[int, ...], give_up_after_s: float = 5.0) -> None:
        self.num_begun[request_id] = self.num_begun.get(request_id, 0) + 1
        self.inbox.append(
            LoadPrefix(
                pool_epoch=self.epoch,
                request_id=request_id,
                token_ids=token_ids,
                cache_salt="",
                num_reserved_tokens=len(token_ids) + 1,
                give_up_at_s=self.now_s + give_up_after_s,
                prefill_tokens_per_s=0.0,
            )
        )

    def cancel(self, request_id: int) -> None:
        self.inbox.append(CancelLoad(request_id=request_id))

    def is_loading(self, request_id: int) -> bool:
        return self.num_begun.get(request_id, 0) > len(self.ended.get(request_id, []))

    def _hear_scheduler(self, message: Message) -> None:
        assert isinstance(message, PrefixLoaded)
        ended = self.ended.setdefault(message.request_id, [])
        ended.append(message)
        assert len(ended) <= self.num_begun[message.request_id], "answered twice"
        if message.holds_blocks and message.pool_epoch == self.epoch:
            confirmed = self.loading.pop(message.request_id)
            assert confirmed.state == "confirmed"
            self._give_back(confirmed)  # it is released by the scheduler, or runs and ends

    # the allocator

    def _hear_block_allocator(self, message: Message) -> None:
        if isinstance(message, ConfirmRemoteCacheLoadingResult) and message.pool_epoch == self.epoch:
            self._note_promise(message)
        self.to_allocator.append(message)

    def _note_promise(self, confirm: ConfirmRemoteCacheLoadingResult) -> None:
        load = self.loading[confirm.request_id]
        keys = self.keys_of[confirm.request_id]
        mark = self.num_copies_said
        if self.config.fa_block_bytes:
            for index in range(load.fa, confirm.matched_block_index):
                place = ("fa", load.fa_ids[index - load.fa])
                self.owed.append((mark, place, keys[index] + FA_KIND))
        for block_id, index in zip(load.swa_ids, confirm.matched_remote_swa_block_indexs, strict=True):
            if index >= 0:
                self.owed.append((mark, ("swa", block_id), keys[index] + SWA_KIND))
        self._pay()

    def allocator_acts(self, *, refuses: bool = False) -> None:
        message = self.to_allocator.popleft()
        if getattr(message, "pool_epoch", None) != self.epoch:
            return
        if isinstance(message, GetRequestPrefixBlockNumberBeforeRemoteCacheLoading):
            self._probe(message, refuses)
        elif isinstance(message, AllocateBlocksForRemoteCache):
            self._reserve(message, refuses)
        elif isinstance(message, ConfirmRemoteCacheLoadingResult):
            self._confirm(message)
        elif isinstance(message, DropRemoteCacheLoading):
            self._give_back(self.loading.pop(message.request_id))
        elif isinstance(message, HoldBlocks):
            held = [block for block in message.blocks if block in self.filled and self.random.random() < 0.8]
            self.holds[message.hold_id] = tuple(held)
            answer = tuple(HeldBlock(block=block, swa_block_id=self._swa_of(block)) for block in held)
            self.inbox.append(BlocksHeld(pool_epoch=self.epoch, hold_id=message.hold_id, held=answer))
        elif isinstance(message, ReleaseHeldBlocks):
            del self.holds[message.hold_id]
        else:
            raise AssertionError(message)

    @property
    def keys_of(self) -> dict[int, tuple[bytes, ...]]:
        return {request_id: load.keys for request_id, load in self.core.state.loads.items()}

    def _swa_of(self, block: FaBlock) -> int:
        gone = not self.config.swa_block_bytes or block.generation % 3 == 0
        return NO_BLOCK if gone else 1000 + block.fa_block_id

    def _probe(self, call: GetRequestPrefixBlockNumberBeforeRemoteCacheLoading, refuses: bool) -> None:
        assert call.request_id not in self.loading
        if refuses:
            self._refuse(call, "GetRequestPrefixBlockNumberBeforeRemoteCacheLoading")
            return
        limit = (len(call.token_ids) - 1) // self.config.block_size
        fa = self.random.choice([0, self.random.randint(0, limit), limit])
        valid: tuple[bool, ...] = ()
        endpoint = fa
        if self.config.window_blocks:
            valid = tuple(self.random.random() < 0.6 for _ in range(fa))
            endpoint = self._endpoint(valid)
        self.loading[call.request_id] = Loading(len(call.token_ids), fa=fa, swa_valid=valid)
        self.inbox.append(
            PrefixBlockNumber(
                pool_epoch=self.epoch,
                request_id=call.request_id,
                fa_block_num=fa,
                swa_block_num=endpoint,
                swa_valid=valid,
            )
        )

    def _endpoint(self, valid: tuple[bool, ...]) -> int:
        return last_valid_end(
            valid, self.config.window_blocks, window_open_at_start=self.config.window_open_at_start
        )

    def _reserve(self, call: AllocateBlocksForRemoteCache, refuses: bool) -> None:
        load = self.loading[call.request_id]
        assert load.state == "probed"
        limit = (load.num_tokens - 1) // self.config.block_size
        assert 0 <= call.fa_block_num <= limit - load.fa
        assert 0 <= call.swa_block_num <= self.config.window_blocks
        assert call.fa_block_num + call.swa_block_num > 0
        fa, swa = self.free["fa"], self.free["swa"]
        if refuses or call.fa_block_num > len(fa) or call.swa_block_num > len(swa):
            self._refuse(call, "AllocateBlocksForRemoteCache")
            return
        load.state = "allocated"
        load.fa_ids = tuple(fa.pop() for _ in range(call.fa_block_num))
        load.swa_ids = tuple(swa.pop() for _ in range(call.swa_block_num))
        for place in (*(("fa", i) for i in load.fa_ids), *(("swa", i) for i in load.swa_ids)):
            self.pools[place] = RUBBISH
        self.inbox.append(
            RemoteBlocksAllocated(
                pool_epoch=self.epoch,
                request_id=call.request_id,
                fa_block_ids=load.fa_ids,
                swa_block_ids=load.swa_ids,
            )
        )

    def _confirm(self, call: ConfirmRemoteCacheLoadingResult) -> None:
        load = self.loading[call.request_id]
        assert load.state in ("probed", "allocated")
        limit = (load.num_tokens - 1) // self.config.block_size
        matched, indices = call.matched_block_index, call.matched_remote_swa_block_indexs
        assert load.fa <= matched <= min(limit, load.fa + len(load.fa_ids))
        assert len(indices) == len(load.swa_ids)
        real = [index for index in indices if index >= 0]
        assert real == sorted(set(real))
        assert all(index < matched for index in real)
        assert 0 <= call.reserved_block_num <= load.fa + len(load.fa_ids) - matched
        cached = local = load.fa if not self.config.window_blocks else self._endpoint(load.swa_valid)
        if self.config.window_blocks:
            valid = [i in real or (i < load.fa and load.swa_valid[i]) for i in range(matched)]
            cached = self._endpoint(tuple(valid))
        else:
            cached = matched
        load.state = "confirmed"
        self.inbox.append(
            RemoteLoadingConfirmed(
                pool_epoch=self.epoch,
                request_id=call.request_id,
                cached_blocks=cached,
                num_remote_blocks=cached - local,
            )
        )

    def _refuse(self, call: Message, name: str) -> None:
        refused = RemoteCallRefused(
            pool_epoch=self.epoch,
            request_id=call.request_id,  # type: ignore[attr-defined]
            call=name,  # type: ignore[arg-type]
            reason="no_room",
            detail="",
        )
        self.inbox.append(refused)

    def _give_back(self, load: Loading) -> None:
        self.free["fa"] += load.fa_ids
        self.free["swa"] += load.swa_ids

    def fill(self, num_blocks: int) -> None:
        """Blocks of somebody's chain were computed."""
        blocks = []
        for _ in range(num_blocks):
            number = self.random.randrange(30)
            block = FaBlock(fa_block_id=200 + number, generation=number)
            filled = FilledBlock(block=block, chain_key=b"chain %d" % number, index=number)
            self.filled[block] = filled
            self.pools["fa", block.fa_block_id] = filled.chain_key + FA_KIND
            self.pools["swa", 1000 + block.fa_block_id] = filled.chain_key + SWA_KIND
            blocks.append(filled)
        self.inbox.append(BlocksFilled(pool_epoch=self.epoch, blocks=tuple(dict.fromkeys(blocks))))

    # the worker

    def _hear_executor(self, message: Message) -> None:
        assert isinstance(message, CopyFromStaging | CopyToStaging)
        if message.pool_epoch != self.epoch:
            return
        for block in message.blocks:
            if isinstance(message, CopyFromStaging):
                ids = [
                    block_id
                    for load in self.loading.values()
                    if load.state == "allocated"
                    for block_id in (load.fa_ids if block.pool == "fa" else load.swa_ids)
                ]
                assert block.block_id in ids, "a copy into a block that is nobody's"
        self.num_copies_said += 1
        self.to_worker.append(message)

    def worker_acts(self) -> None:
        order = self.to_worker.popleft()
        for block in order.blocks:
            if isinstance(order, CopyFromStaging):
                self.pools[block.pool, block.block_id] = self.slots[block.slot]
            else:
                self.slots[block.slot] = self.pools[block.pool, block.block_id]
        self.num_copies_done += 1
        self.inbox.append(StagingCopied(pool_epoch=order.pool_epoch, copy_id=order.copy_id))
        self._pay()

    def _pay(self) -> None:
        """Where every copy said before a Confirm is done, the blocks must hold what it promised."""
        for mark, place, key in self.owed:
            if mark <= self.num_copies_done:
                assert self.pools[place] == key, f"{place} holds {self.pools[place]!r} instead of {key!r}"
        self.owed = [owed for owed in self.owed if owed[0] > self.num_copies_done]

    def restart(self) -> None:
        """The worker is lost and back. What was under way to or from the old one may still arrive."""
        self.epoch += 1
        self.to_worker.clear()
        self.num_copies_done = self.num_copies_said
        self.owed.clear()
        self.loading.clear()
        self.holds.clear()
        self.filled.clear()
        self.free = {"fa": list(range(self.pool_size)), "swa": list(range(self.pool_size))}
        self.inbox.append(ResetPools(pool_epoch=self.epoch))

    # the store

    def _hear_store(self, message: Message) -> None:
        assert isinstance(message, StoreOrder)
        assert message.deadline_s > self.now_s
        if isinstance(message, StoreFetch):
            for block in message.blocks:
                self.slots[block.slot] = RUBBISH
        elif isinstance(message, StoreSave):
            self._check_save(message)
        self.to_store.append(message)

    def _check_save(self, order: StoreSave) -> None:
        for block in order.blocks:
            assert self.slots[block.slot] == block.key, "a save of something else"

    def store_acts(
        self, at: int = 0, *, share: float = 1.0, bad: ItemResult = "failed", timed_out: bool = False
    ) -> None:
        """Answer order `at` of those it has: well for a share of its keys or blocks, badly for the rest."""
        order = self.to_store.pop(at)
        seconds = self.random.uniform(0.001, 1)
        if isinstance(order, StoreFind):
            error = "unreachable" if timed_out or (bad == "failed" and share == 0) else None
            found = tuple(self.random.random() < share for _ in order.keys) if error is None else ()
            self.inbox.append(
                StoreFound(op_id=order.op_id, found=found, seconds=seconds, error=error, timed_out=timed_out)
            )
            return
        results = [self._do(order, at, bad, share) for at in range(len(order.blocks))]
        kind = StoreFetched if isinstance(order, StoreFetch) else StoreSaved
        error = "trouble" if timed_out or {"failed", "corrupt"} & set(results) else None
        self.inbox.append(
            kind(
                op_id=order.op_id,
                results=tuple(results),
                seconds=seconds,
                error=error,
                timed_out=timed_out,
            )
        )

    def _do(self, order: StoreFetch | StoreSave, at: int, bad: ItemResult, share: float) -> ItemResult:
        block = order.blocks[at]
        is_good = self.random.random() < share
        if isinstance(order, StoreSave):
            self._check_save(order)
            return "ok" if is_good else "failed"
        if is_good:
            self.slots[block.slot] = block.key
        return "ok" if is_good else bad

    # time

    def pass_time(self, seconds: float) -> None:
        """Orders whose deadline comes are answered."""
        self.now_s += seconds
        while late := [i for i, order in enumerate(self.to_store) if order.deadline_s <= self.now_s]:
            self.store_acts(late[0], share=self.random.choice([0.0, 0.5]), timed_out=True)
        self.deliver(0)

    def bustle(self, num_acts: int, share_bad: float) -> None:
        """Any of those that have something to do does it, again and again; the store not always well."""
        for _ in range(num_acts):
            acts = [
                act
                for act, can in (
                    (self.deliver, self.inbox),
                    (self.allocator_acts, self.to_allocator),
                    (self.worker_acts, self.to_worker),
                    (lambda: self.store_somehow(share_bad), self.to_store),
                )
                if can
            ]
            if not acts:
                return
            self.random.choice(acts)()

    def store_somehow(self, share_bad: float) -> None:
        at = self.random.randrange(len(self.to_store))
        if self.random.random() >= share_bad:
            self.store_acts(at)
            return
        self.store_acts(
            at,
            share=self.random.choice([0.0, 0.5, 0.9]),
            bad=self.random.choice(["missing", "corrupt", "failed"]),
            timed_out=self.random.random() < 0.1,
        )

    def settle(self) -> None:
        """Everybody does what there is to do, until nobody has anything to do any more."""
        for _ in range(10_000):
            if self.inbox:
                self.deliver(len(self.inbox))
            elif self.to_allocator:
                self.allocator_acts()
            elif self.to_worker:
                self.worker_acts()
            elif self.to_store:
                self.store_acts()
            elif self.core.state.breaker.phase != "closed":
                timer = self.core.next_timer_s()
                assert timer is not None
                self.pass_time(timer - self.now_s)
            else:
                return
        raise AssertionError("it never comes to rest")

    def check_at_rest(self) -> None:
        state = self.core.state
        assert not any(self.is_loading(request_id) for request_id in self.num_begun)
        assert not any((state.loads, state.operations, state.copies, state.batches, state.batch_of_copy))
        assert len(state.free_load_slots) + len(state.free_write_slots) == self.config.num_slots
        assert not state.queue
        assert not self.loading
        assert not self.holds
        assert not self.owed
        assert self.core.next_timer_s() is None
