"""The small engine with a remote-cache loader, whose store has every block there is, right or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ksana.cache.cache_config import CacheConfig
from ksana.cache.chain_keys import chain_keys, root_key
from ksana.cache.prefix_tree import token_bytes
from ksana.messages.base import Message
from ksana.messages.blocks import NO_BLOCK, BlocksPlanned, PlanBlocks
from ksana.messages.remote import (
    AllocateBlocksForRemoteCache,
    BlocksFilled,
    BlocksHeld,
    ConfirmRemoteCacheLoadingResult,
    DropRemoteCacheLoading,
    FilledBlock,
    GetRequestPrefixBlockNumberBeforeRemoteCacheLoading,
    HoldBlocks,
    PrefixBlockNumber,
    ReleaseHeldBlocks,
    RemoteBlocksAllocated,
    RemoteCallRefused,
    RemoteLoadingConfirmed,
)
from tests.stateful.cache_world import POISON, Request, World


@dataclass
class Load:
    """A load as the loader sees it."""

    request: Request
    state: str = "none"
    calls: list[Message] = field(default_factory=list)
    """Not answered yet, in order."""
    is_gone: bool = False
    """Dropped: answers to its calls mean nothing any more."""
    fa_hit: int = 0
    fa_blocks: tuple[int, ...] = ()
    swa_blocks: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.fa_hit + len(self.fa_blocks)


@dataclass
class Hold:
    hold_id: int
    blocks: list[FilledBlock]
    is_read: bool = False
    """The worker has copied them to staging memory."""


class LoadingWorld(World):
    """Waiting requests may load: then they are in `loads` instead, and come back with what they hold."""

    def __init__(self, config: CacheConfig, budget: int = 8) -> None:
        super().__init__(config, budget)
        self.loads: dict[int, Load] = {}
        self.asked: list[Load] = []
        """Whose call each answer of the allocator is about, in order."""
        self.confirmed: list[int] = []
        """Waiting requests that hold confirmed blocks."""
        self.offers: list[FilledBlock] = []
        self.holds: list[Hold] = []
        self.asked_holds: list[Hold] = []
        self.content: dict[bytes, tuple[str, list[int]]] = {}
        """By chain key: the KV of a block, which depends on all tokens before it."""
        self.num_confirmed = self.num_remote_blocks = self.num_refused = self.num_read = 0
        self._last_hold_id = 0
        # A call that means nothing; from now on the allocator knows the epoch.
        self._tell_allocator(DropRemoteCacheLoading(pool_epoch=self._epoch, request_id=0))

    def add(self, prompt: tuple[int, ...], num_output: int, salt: str) -> None:
        super().add(prompt, num_output, salt)
        request = self.requests[self.waiting[-1]]
        size = self.config.block_size
        keys = chain_keys(root_key(self.config.chain_identity, salt), request.truth, size)
        for index, key in enumerate(keys):
            self.content[key] = (salt, request.kv[index * size : (index + 1) * size])

    # The loader's calls

    def start_load(self, request_id: int) -> None:
        self.waiting.remove(request_id)
        request = self.requests[request_id]
        load = self.loads[request_id] = Load(request)
        call = GetRequestPrefixBlockNumberBeforeRemoteCacheLoading(
            pool_epoch=self._epoch,
            request_id=request_id,
            token_ids=request.truth[: request.known],
            cache_salt=request.salt,
            num_reserved_tokens=request.known + 1,
            resumed=request.was_preempted,
        )
        self._call(load, call)

    def _call(self, load: Load, call: Message) -> None:
        load.calls.append(call)
        self.asked.append(load)
        self._tell_allocator(call)

    def allocate(self, load: Load, num_fa: int, num_swa: int) -> None:
        size = self.config.block_size
        cap = (load.request.known - 1) // size
        call = AllocateBlocksForRemoteCache(
            pool_epoch=self._epoch,
            request_id=load.request.request_id,
            fa_block_num=min(num_fa, -(-load.request.known // size) - load.fa_hit),
            swa_block_num=min(num_swa, cap) if self.manager is not None else 0,
        )
        self._call(load, call)

    def confirm(self, load: Load, num_fa: int, num_kept: int, picks: Sequence[int | None]) -> None:
        """`num_fa` blocks came; of the sliding ones those that `picks` names, by distance from the end of
        the last one (or not at all)."""
        cap = (load.request.known - 1) // self.config.block_size
        matched = min(load.fa_hit + num_fa, load.end, cap)
        slots, last = [], -1
        for _, pick in zip(load.swa_blocks, picks, strict=False):
            index = -1 if pick is None or last + 1 + pick >= matched else last + 1 + pick
            slots.append(index)
            last = max(last, index)
        slots += [-1] * (len(load.swa_blocks) - len(slots))
        self._copy(self._copies_in(load, matched, slots))
        call = ConfirmRemoteCacheLoadingResult(
            pool_epoch=self._epoch,
            request_id=load.request.request_id,
            matched_block_index=matched,
            matched_remote_swa_block_indexs=tuple(slots),
            reserved_block_num=min(num_kept, load.end - matched),
        )
        self._call(load, call)

    def _copies_in(self, load: Load, matched: int, slots: list[int]) -> Callable[[], None]:
        """Right content where the transfer succeeded, rubbish where it did not."""
        size, kv, fa_kv, swa_kv = self.config.block_size, load.request.kv, self.fa_kv, self.swa_kv

        def block(index: int) -> list[int]:
            return kv[index * size : (index + 1) * size]

        def copy() -> None:
            for index, block_id in enumerate(load.fa_blocks, load.fa_hit):
                fa_kv[block_id] = block(index) if index < matched else [POISON] * size
            for index, block_id in zip(slots, load.swa_blocks, strict=True):
                swa_kv[block_id] = block(index) if index >= 0 else [POISON] * size

        return copy

    def _copy(self, copy: Callable[[], None]) -> None:
        self.copies.append(copy)
        self.run_copies()

    def drop(self, request_id: int, *, for_good: bool) -> None:
        load = self.loads.pop(request_id)
        load.is_gone = True
        if for_good:
            del self.requests[request_id]
        else:
            self._wait_again(load.request)
        self._tell_allocator(DropRemoteCacheLoading(pool_epoch=self._epoch, request_id=request_id))

    def _wait_again(self, request: Request) -> None:
        self.waiting.append(request.request_id)
        self.waiting.sort()

    def bad_call(self, call: Message) -> None:
        """Must be refused, and change nothing; only while nothing else is open."""
        assert not self.allocator.is_batch_open
        before = self._states()
        [(address, answer)] = self.allocator.handle(0.0, [call])
        assert address == "remote_cache_loader"
        assert isinstance(answer, RemoteCallRefused), (call, answer)
        assert self._states() == before
        self.num_refused += 1

    def _states(self) -> object:
        return self.allocator.snapshot()["fa"], self.manager.snapshot() if self.manager is not None else None

    def give_up_confirmed(self, request_id: int, *, for_good: bool) -> None:
        """The scheduler takes a confirmed request's blocks away before it runs."""
        self.confirmed.remove(request_id)
        self.releases.append(request_id)
        if for_good:
            self.waiting.remove(request_id)
            del self.requests[request_id]

    # Answers

    def hear_remote(self, said: Message) -> None:
        if isinstance(said, BlocksFilled):
            self._hear_filled(said)
        elif isinstance(said, BlocksHeld):
            self._hear_held(said)
        else:
            load = self.asked.pop(0)
            call = load.calls.pop(0)
            if not load.is_gone:
                self._hear_answer(load, call, said)

    def _hear_answer(self, load: Load, call: Message, said: Message) -> None:
        request = load.request
        if isinstance(said, RemoteCallRefused):
            assert said.call == type(call).__name__
            assert said.reason == "no_room", said
            self.num_refused += 1
            if load.state == "none":
                del self.loads[request.request_id]
                self._wait_again(request)
        elif isinstance(said, PrefixBlockNumber):
            load.state, load.fa_hit = "probed", said.fa_block_num
            self._check_endpoint(said.swa_block_num, said.fa_block_num, said.swa_valid)
        elif isinstance(said, RemoteBlocksAllocated):
            load.state, load.fa_blocks, load.swa_blocks = "allocated", said.fa_block_ids, said.swa_block_ids
        else:
            assert isinstance(said, RemoteLoadingConfirmed)
            assert isinstance(call, ConfirmRemoteCacheLoadingResult)
            del self.loads[request.request_id]
            self._wait_again(request)
            self.confirmed.append(request.request_id)
            self.num_confirmed += 1
            self.num_remote_blocks += said.num_remote_blocks
            self._check_confirmed(request, said, call.matched_block_index)

    def _check_endpoint(self, endpoint: int, num_blocks: int, valid: Sequence[bool]) -> None:
        """Section 2's rule, by brute force: the last window before the endpoint is valid; none later is."""
        if self.manager is None:
            assert endpoint == num_blocks
            return
        assert len(valid) == num_blocks
        window = self.config.window_blocks
        is_open = self.config.window_open_at_start
        good = [
            end
            for end in range(1, num_blocks + 1)
            if all(valid[max(0, end - window) : end]) and (is_open or end >= window)
        ]
        assert endpoint == max(good, default=0)

    def _check_confirmed(self, request: Request, said: RemoteLoadingConfirmed, matched: int) -> None:
        fa = self.allocator.fa
        path = fa.tree.match(request.salt, token_bytes(request.truth[: request.known]), matched)
        assert len(path) == matched
        valid: list[bool] = []
        if self.manager is not None:
            valid = [self.manager.cache.is_valid(fa.fa_block(block_id)) for block_id in path]
        self._check_endpoint(said.cached_blocks, matched, valid)

    def _hear_filled(self, said: BlocksFilled) -> None:
        """What is offered lies in the pool under its right name."""
        for filled in said.blocks:
            _, content = self.content[filled.chain_key]
            assert self.fa_kv[filled.block.fa_block_id] == content
        self.offers.extend(said.blocks)

    # Writing back

    def hold(self, offers: list[FilledBlock]) -> None:
        self._last_hold_id += 1
        self.asked_holds.append(Hold(self._last_hold_id, offers))
        call = HoldBlocks(
            pool_epoch=self._epoch, hold_id=self._last_hold_id, blocks=tuple(o.block for o in offers)
        )
        self._tell_allocator(call)

    def _hear_held(self, said: BlocksHeld) -> None:
        hold = self.asked_holds.pop(0)
        assert hold.hold_id == said.hold_id
        if said.pool_epoch != self._epoch:
            assert not said.held
            return
        keys = {offer.block: offer.chain_key for offer in hold.blocks}
        fa_kv, swa_kv = self.fa_kv, self.swa_kv

        def read() -> None:
            for held in said.held:
                _, content = self.content[keys[held.block]]
                assert fa_kv[held.block.fa_block_id] == content
                if held.swa_block_id != NO_BLOCK:
                    assert swa_kv[held.swa_block_id] == content
            hold.is_read = True
            self.num_read += len(said.held)

        self.holds.append(hold)
        self._copy(read)

    def release_hold(self, hold: Hold) -> None:
        self.holds.remove(hold)
        self._tell_allocator(ReleaseHeldBlocks(pool_epoch=self._epoch, hold_id=hold.hold_id))

    # Larger moves

    def _take_answer(self, answer: BlocksPlanned) -> None:
        for grant in answer.grants:
            if grant.request_id in self.confirmed:
                self.confirmed.remove(grant.request_id)
        super()._take_answer(answer)

    def plan_of_loading(self, request_id: int) -> None:
        """A scheduler that plans a request which is loading is told so."""
        self._last_step_id += 1
        request = self.requests[request_id]
        oldest = self.in_flight[0].step_id if self.in_flight else self._last_step_id
        plan = PlanBlocks(
            pool_epoch=self._epoch,
            step_id=self._last_step_id,
            done_step_id=oldest - 1,
            token_budget=8,
            demands=(self._new_demand(request),),
        )
        self.open = plan
        self._tell_allocator(plan)

    def reset(self) -> None:
        for request_id in list(self.loads):
            load = self.loads.pop(request_id)
            load.is_gone = True
            self._wait_again(load.request)
        self.confirmed = []
        self.offers = []
        self.holds = []
        super().reset()
        # What was asked before was answered before the reset took effect, or by it.
        assert not self.asked, self.asked

    def make_way(self) -> bool:
        """Confirmed blocks are dropped, newest first."""
        if self.confirmed:
            self.give_up_confirmed(max(self.confirmed), for_good=False)
            return True
        return False

    def run_to_the_end(self, max_steps: int = 2000) -> None:
        self.settle()
        for request_id in list(self.loads):
            self.drop(request_id, for_good=False)
        self.settle()
        while self.in_flight:
            self.step_done()
        self.run_copies()
        for hold in list(self.holds):
            assert hold.is_read
            self.release_hold(hold)
        super().run_to_the_end(max_steps)
