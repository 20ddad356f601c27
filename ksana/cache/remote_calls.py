"""The block allocator's answers to the remote-cache loader, one call at a time, between batches."""

from __future__ import annotations

from typing import Literal, TypedDict, cast

from ksana.cache.cache_config import CacheConfig
from ksana.cache.fa_cache import FaCache
from ksana.cache.held_blocks import HeldBlocks
from ksana.cache.remote_loading import CallRefused, Confirmed, RemoteLoading
from ksana.errors import InvariantViolated
from ksana.messages.base import Message, PoolEpoch
from ksana.messages.blocks import NO_BLOCK
from ksana.messages.remote import (
    AllocateBlocksForRemoteCache,
    BlocksHeld,
    ConfirmRemoteCacheLoadingResult,
    DropRemoteCacheLoading,
    GetRequestPrefixBlockNumberBeforeRemoteCacheLoading,
    HeldBlock,
    HoldBlocks,
    PrefixBlockNumber,
    ReleaseHeldBlocks,
    RemoteBlocksAllocated,
    RemoteCallName,
    RemoteCallRefused,
    RemoteLoadingConfirmed,
)
from ksana.messages.swa import FaBlock
from ksana.messages.swa_remote import (
    SwaAnswer,
    SwaCallRefused,
    SwaConfirm,
    SwaConfirmed,
    SwaDrop,
    SwaForget,
    SwaHeld,
    SwaHold,
    SwaProbe,
    SwaProbed,
    SwaReleaseConfirmed,
    SwaReleaseHeld,
    SwaReserve,
    SwaReserved,
)

Said = tuple[Literal["scheduler", "swa_cache_manager", "remote_cache_loader"], Message]

LoadingCall = (
    GetRequestPrefixBlockNumberBeforeRemoteCacheLoading
    | AllocateBlocksForRemoteCache
    | ConfirmRemoteCacheLoadingResult
)
RemoteCall = LoadingCall | DropRemoteCacheLoading | HoldBlocks | ReleaseHeldBlocks


class CallsSnapshot(TypedDict):
    """RemoteCalls as plain values, but for the FaCache."""

    open: LoadingCall | HoldBlocks | None
    num_local: int | None
    """Of the confirmed request, if a Confirm is open."""
    held: list[FaBlock]


class RemoteCalls:
    """Answers calls; asks the SWA cache manager in the middle of one, if the model has sliding layers.

    Invariant: while a call is open, the FA part has done nothing that a refusal could not take back.
    """

    def __init__(self, config: CacheConfig, fa: FaCache) -> None:
        self.config = config
        self.fa = fa
        self.loading = RemoteLoading(fa)
        self.held = HeldBlocks(fa)
        self._open: LoadingCall | HoldBlocks | None = None
        self._confirmed: Confirmed | None = None
        self._held: list[FaBlock] = []

    @property
    def open_call(self) -> LoadingCall | HoldBlocks | None:
        """The call that waits for the SWA cache manager."""
        return self._open

    @property
    def is_open(self) -> bool:
        return self._open is not None

    # Calls

    def call(self, call: RemoteCall) -> list[Said]:
        """Do it, or ask the SWA cache manager first. None is open."""
        if isinstance(call, DropRemoteCacheLoading):
            return self._drop(call)
        if isinstance(call, ReleaseHeldBlocks):
            self.held.release(call.hold_id)
            question = SwaReleaseHeld(pool_epoch=call.pool_epoch, hold_id=call.hold_id)
            return [("swa_cache_manager", question)] if self.config.has_swa else []
        if isinstance(call, HoldBlocks):
            return self._hold(call)
        try:
            if isinstance(call, GetRequestPrefixBlockNumberBeforeRemoteCacheLoading):
                return self._probe(call)
            if isinstance(call, AllocateBlocksForRemoteCache):
                return self._allocate(call)
            return self._confirm(call)
        except CallRefused as refused:
            return [_refusal(call, refused)]

    def _ask(self, call: LoadingCall | HoldBlocks, question: Message) -> list[Said]:
        self._open = call
        return [("swa_cache_manager", question)]

    def _probe(self, call: GetRequestPrefixBlockNumberBeforeRemoteCacheLoading) -> list[Said]:
        load = self.loading.probe(call)
        if not self.config.has_swa:
            return [self._prefix_block_number(call, len(load.pinned), ())]
        question = SwaProbe(
            pool_epoch=call.pool_epoch,
            request_id=call.request_id,
            fa_blocks=self.fa.fa_blocks(load.pinned),
            num_total_tokens=load.num_tokens,
            num_reserved_tokens=load.num_reserved_tokens,
        )
        return self._ask(call, question)

    def _allocate(self, call: AllocateBlocksForRemoteCache) -> list[Said]:
        self.loading.check_allocate(call)
        if not call.swa_block_num:
            return self._allocated(call, ())
        question = SwaReserve(
            pool_epoch=call.pool_epoch, request_id=call.request_id, num_blocks=call.swa_block_num
        )
        return self._ask(call, question)

    def _confirm(self, call: ConfirmRemoteCacheLoadingResult) -> list[Said]:
        self.loading.check_confirm(call)
        confirmed = self.loading.confirm(call)
        request = confirmed.request
        if not self.config.has_swa:
            return [self._loading_confirmed(call, confirmed, request.num_matched, confirmed.num_local)]
        self._confirmed = confirmed
        question = SwaConfirm(
            pool_epoch=call.pool_epoch,
            request_id=call.request_id,
            fa_blocks=self.fa.fa_blocks(request.fa_block_ids[: request.num_matched]),
            num_local=confirmed.num_local,
            matched_indices=call.matched_remote_swa_block_indexs,
            num_total_tokens=request.num_tokens,
            num_reserved_tokens=request.num_reserved_tokens,
        )
        return self._ask(call, question)

    def _drop(self, call: DropRemoteCacheLoading) -> list[Said]:
        """Also after a Confirm, until the request runs: then it gives back what it was given."""
        question: Message
        request = self.fa.requests.get(call.request_id)
        if request is not None and request.is_confirmed:
            self.fa.release_request(call.request_id)
            question = SwaReleaseConfirmed(pool_epoch=call.pool_epoch, request_id=call.request_id)
        elif self.loading.drop(call.request_id):
            question = SwaDrop(pool_epoch=call.pool_epoch, request_id=call.request_id)
        else:
            return []
        return [("swa_cache_manager", question)] if self.config.has_swa else []

    def _hold(self, call: HoldBlocks) -> list[Said]:
        self._held = self.held.hold(call.hold_id, call.blocks)
        if not self.config.has_swa:
            return [self._blocks_held(call, [NO_BLOCK] * len(self._held))]
        question = SwaHold(pool_epoch=call.pool_epoch, hold_id=call.hold_id, blocks=tuple(self._held))
        return self._ask(call, question)

    # Answers

    def swa_answer(self, answer: SwaAnswer) -> list[Said]:
        """The SWA cache manager has answered the open call's question."""
        call, self._open = self._open, None
        confirmed, self._confirmed = self._confirmed, None
        if isinstance(call, HoldBlocks):
            if isinstance(answer, SwaHeld):
                return [self._blocks_held(call, answer.swa_block_ids)]
        elif isinstance(call, GetRequestPrefixBlockNumberBeforeRemoteCacheLoading):
            if isinstance(answer, SwaProbed):
                return [self._prefix_block_number(call, answer.endpoint, answer.valid)]
            if isinstance(answer, SwaCallRefused):
                self.loading.undo_probe(call.request_id)
                return [_refusal(call, CallRefused("no_room", answer.detail))]
        elif isinstance(call, AllocateBlocksForRemoteCache):
            if isinstance(answer, SwaReserved):
                return self._allocated(call, answer.swa_block_ids)
            if isinstance(answer, SwaCallRefused):
                return [_refusal(call, CallRefused("no_room", answer.detail))]
        elif confirmed is not None and call is not None and isinstance(answer, SwaConfirmed):
            return [self._loading_confirmed(call, confirmed, answer.endpoint, answer.local_endpoint)]
        raise InvariantViolated(f"{type(answer).__name__} is no answer to {type(call).__name__}")

    def _prefix_block_number(
        self,
        call: GetRequestPrefixBlockNumberBeforeRemoteCacheLoading,
        endpoint: int,
        valid: tuple[bool, ...],
    ) -> Said:
        answer = PrefixBlockNumber(
            pool_epoch=call.pool_epoch,
            request_id=call.request_id,
            fa_block_num=len(self.fa.loads[call.request_id].pinned),
            swa_block_num=endpoint,
            swa_valid=valid,
        )
        return ("remote_cache_loader", answer)

    def _allocated(self, call: AllocateBlocksForRemoteCache, swa_block_ids: tuple[int, ...]) -> list[Said]:
        load = self.loading.allocate(call)
        answer = RemoteBlocksAllocated(
            pool_epoch=call.pool_epoch,
            request_id=call.request_id,
            fa_block_ids=tuple(load.reserved),
            swa_block_ids=swa_block_ids,
        )
        return [*self._forget(call.pool_epoch), ("remote_cache_loader", answer)]

    def _forget(self, pool_epoch: PoolEpoch) -> list[Said]:
        """FA blocks evicted for this call; the next batch would be too late to say so."""
        if not self.config.has_swa:
            return []
        evicted = self.fa.take_evicted()
        question = SwaForget(pool_epoch=pool_epoch, evicted=evicted)
        return [("swa_cache_manager", question)] if evicted else []

    def _loading_confirmed(
        self, call: LoadingCall, confirmed: Confirmed, endpoint: int, local_endpoint: int
    ) -> Said:
        self.loading.start_at(confirmed, endpoint, local_endpoint)
        answer = RemoteLoadingConfirmed(
            pool_epoch=call.pool_epoch,
            request_id=call.request_id,
            cached_blocks=endpoint,
            num_remote_blocks=endpoint - local_endpoint,
        )
        return ("remote_cache_loader", answer)

    def _blocks_held(self, call: HoldBlocks, swa_block_ids: list[int] | tuple[int, ...]) -> Said:
        answer = BlocksHeld(
            pool_epoch=call.pool_epoch,
            hold_id=call.hold_id,
            held=tuple(
                HeldBlock(block=block, swa_block_id=swa_block_id)
                for block, swa_block_id in zip(self._held, swa_block_ids, strict=True)
            ),
        )
        self._held = []
        return ("remote_cache_loader", answer)

    # Snapshots

    def snapshot(self) -> CallsSnapshot:
        """What the FaCache does not have, as plain values."""
        num_local = None if self._confirmed is None else self._confirmed.num_local
        return {"open": self._open, "num_local": num_local, "held": list(self._held)}

    def restore(self, snapshot: CallsSnapshot) -> None:
        """Go on from a snapshot. The FaCache was restored before."""
        call, num_local = snapshot["open"], snapshot["num_local"]
        self._open, self._confirmed, self._held = call, None, list(snapshot["held"])
        if num_local is None:
            return
        request = (
            None if call is None or isinstance(call, HoldBlocks) else self.fa.requests.get(call.request_id)
        )
        if request is None:
            raise InvariantViolated(f"{call} was confirmed, but no request is there")
        self._confirmed = Confirmed(request, num_local)


def stale_answer(call: RemoteCall) -> list[Said]:
    """The answer to a call about pools that were emptied meanwhile."""
    if isinstance(call, HoldBlocks):
        answer = BlocksHeld(pool_epoch=call.pool_epoch, hold_id=call.hold_id, held=())
        return [("remote_cache_loader", answer)]
    if isinstance(call, DropRemoteCacheLoading | ReleaseHeldBlocks):
        return []
    return [_refusal(call, CallRefused("wrong_state", "the pools were reset"))]


def _refusal(call: LoadingCall, refused: CallRefused) -> Said:
    answer = RemoteCallRefused(
        pool_epoch=call.pool_epoch,
        request_id=call.request_id,
        call=cast(RemoteCallName, type(call).__name__),
        reason=refused.reason,
        detail=refused.detail,
    )
    return ("remote_cache_loader", answer)
