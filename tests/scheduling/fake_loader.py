"""A remote-cache loader with a store that has everything, or some of it, or fails, as a seed decides.

It drives the block allocator's calls like the real one. What it "loads" are the hashes that stand for KV in
`tests.scheduling.world`, written by the worker in order with its steps.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from ksana.messages.base import Message, RequestId
from ksana.messages.blocks import ResetPools
from ksana.messages.remote import (
    AllocateBlocksForRemoteCache,
    BlocksFilled,
    BlocksHeld,
    CancelLoad,
    ConfirmRemoteCacheLoadingResult,
    DropRemoteCacheLoading,
    GetRequestPrefixBlockNumberBeforeRemoteCacheLoading,
    HoldBlocks,
    LoadOutcome,
    LoadPrefix,
    PrefixBlockNumber,
    PrefixLoaded,
    ReleaseHeldBlocks,
    RemoteBlocksAllocated,
    RemoteCallRefused,
    RemoteLoadingConfirmed,
)
from ksana.messages.staging import CopyFromStaging, StagedBlock

Said = tuple[str, Message]


def kv_chain(token_ids: Sequence[int]) -> list[int]:
    """What stands for the KV of each position: a hash of all tokens up to it."""
    chain: list[int] = []
    for token_id in token_ids:
        chain.append(hash((chain[-1] if chain else 0, token_id)))
    return chain


class _Load(msgspec.Struct):
    asked: LoadPrefix
    probe: PrefixBlockNumber | None = None
    swa_indices: list[int] = []
    is_cancelled: bool = False
    is_confirming: bool = False


class FakeLoader:
    """`slots` holds what was staged, by (copy id, place in the copy): one hash per token of the block."""

    def __init__(self, seed: int, block_size: int, window_blocks: int) -> None:
        self.rng = random.Random(seed)
        self.block_size = block_size
        self.window_blocks = window_blocks
        self.loads: dict[RequestId, _Load] = {}
        self.slots: dict[tuple[int, int], list[int]] = {}
        self.holds: list[ReleaseHeldBlocks] = []
        self.num_loaded = 0
        self._last_id = 0

    def handle(self, now_s: float, messages: Sequence[Message]) -> list[Said]:  # noqa: ARG002
        said: list[Said] = []
        for message in messages:
            said += self._receive(message)
        return said

    def release_hold(self) -> list[Said]:
        """A store has answered a write-back."""
        return [("block_allocator", self.holds.pop(0))] if self.holds else []

    def _receive(self, message: Message) -> list[Said]:
        if isinstance(message, LoadPrefix):
            return self._begin(message)
        if isinstance(message, ResetPools):
            return self._reset()
        if isinstance(message, CancelLoad):
            load = self.loads.get(message.request_id)
            if load is not None:
                load.is_cancelled = True
            return []
        if isinstance(message, BlocksFilled):
            if self.rng.random() < 0.5:
                return []
            self._last_id += 1
            blocks = tuple(filled.block for filled in message.blocks)
            hold = HoldBlocks(pool_epoch=message.pool_epoch, hold_id=self._last_id, blocks=blocks)
            return [("block_allocator", hold)]
        if isinstance(message, BlocksHeld):
            self.holds.append(ReleaseHeldBlocks(pool_epoch=message.pool_epoch, hold_id=message.hold_id))
            return []
        load = self.loads.get(message.request_id)  # type: ignore[attr-defined]
        if load is None or load.asked.pool_epoch != message.pool_epoch:  # type: ignore[attr-defined]
            return []
        if isinstance(message, PrefixBlockNumber):
            return self._probed(load, message)
        if isinstance(message, RemoteBlocksAllocated):
            return self._allocated(load, message)
        if isinstance(message, RemoteLoadingConfirmed):
            self.num_loaded += message.num_remote_blocks > 0
            return [self._answer(load, "loaded", message)]
        assert isinstance(message, RemoteCallRefused), message
        assert message.reason == "no_room", message
        if load.probe is None:
            return [self._answer(load, "no_room", None)]
        return self._confirm(load, load.probe.fa_block_num, [], 0)

    def _begin(self, message: LoadPrefix) -> list[Said]:
        assert message.request_id not in self.loads
        load = self.loads[message.request_id] = _Load(asked=message)
        if self.rng.random() < 0.1:
            return [self._answer(load, "store_failed", None)]
        return [
            (
                "block_allocator",
                GetRequestPrefixBlockNumberBeforeRemoteCacheLoading(
                    pool_epoch=message.pool_epoch,
                    request_id=message.request_id,
                    token_ids=message.token_ids,
                    cache_salt=message.cache_salt,
                    num_reserved_tokens=message.num_reserved_tokens,
                    resumed=message.resumed,
                ),
            )
        ]

    def _probed(self, load: _Load, probe: PrefixBlockNumber) -> list[Said]:
        load.probe = probe
        if load.is_cancelled:
            return self._drop(load)
        local = probe.fa_block_num
        most = (len(load.asked.token_ids) - 1) // self.block_size
        end = self.rng.randint(local, most)
        if self.window_blocks:
            load.swa_indices = [
                index
                for index in range(max(0, end - self.window_blocks), end)
                if index >= local or not probe.swa_valid[index]
            ]
        if self.rng.random() < 0.1 or (end == local and not load.swa_indices):
            return self._confirm(load, local, [], 0)
        call = AllocateBlocksForRemoteCache(
            pool_epoch=probe.pool_epoch,
            request_id=probe.request_id,
            fa_block_num=end - local,
            swa_block_num=len(load.swa_indices),
        )
        return [("block_allocator", call)]

    def _allocated(self, load: _Load, message: RemoteBlocksAllocated) -> list[Said]:
        if load.is_cancelled:
            return self._drop(load)
        assert load.probe is not None
        local, num_fa = load.probe.fa_block_num, len(message.fa_block_ids)
        matched = local + num_fa if self.rng.random() < 0.7 else self.rng.randint(local, local + num_fa)
        indices = [index if index < matched and self.rng.random() < 0.9 else -1 for index in load.swa_indices]
        staged = [
            ("fa", block_id, local + place)
            for place, block_id in enumerate(message.fa_block_ids)
            if local + place < matched
        ]
        staged += [
            ("swa", block_id, index)
            for index, block_id in zip(indices, message.swa_block_ids, strict=True)
            if index >= 0
        ]
        self._last_id += 1
        chain, size = kv_chain(load.asked.token_ids), self.block_size
        for slot, (_, _, index) in enumerate(staged):
            self.slots[self._last_id, slot] = chain[index * size : (index + 1) * size]
        copy = CopyFromStaging(
            pool_epoch=message.pool_epoch,
            copy_id=self._last_id,
            blocks=tuple(
                StagedBlock(pool=pool, block_id=block_id, slot=slot)  # type: ignore[arg-type]
                for slot, (pool, block_id, _) in enumerate(staged)
            ),
        )
        num_kept = self.rng.randint(0, local + num_fa - matched)
        return [("executor", copy), *self._confirm(load, matched, indices, num_kept)]

    def _confirm(self, load: _Load, matched: int, indices: list[int], num_kept: int) -> list[Said]:
        call = ConfirmRemoteCacheLoadingResult(
            pool_epoch=load.asked.pool_epoch,
            request_id=load.asked.request_id,
            matched_block_index=matched,
            matched_remote_swa_block_indexs=tuple(indices),
            reserved_block_num=num_kept,
        )
        return [("block_allocator", call)]

    def _drop(self, load: _Load) -> list[Said]:
        asked = load.asked
        drop = DropRemoteCacheLoading(pool_epoch=asked.pool_epoch, request_id=asked.request_id)
        return [("block_allocator", drop), self._answer(load, "cancelled", None)]

    def _answer(self, load: _Load, outcome: LoadOutcome, confirmed: RemoteLoadingConfirmed | None) -> Said:
        del self.loads[load.asked.request_id]
        size = self.block_size
        answer = PrefixLoaded(
            pool_epoch=load.asked.pool_epoch,
            request_id=load.asked.request_id,
            outcome=outcome,
            holds_blocks=confirmed is not None,
            num_cached_tokens=confirmed.cached_blocks * size if confirmed is not None else 0,
            num_remote_tokens=confirmed.num_remote_blocks * size if confirmed is not None else 0,
        )
        return ("scheduler", answer)

    def _reset(self) -> list[Said]:
        self.holds.clear()
        return [self._answer(load, "reset", None) for load in list(self.loads.values())]
