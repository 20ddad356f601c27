"""The state machine of loads; `ksana.loading.load` draws it."""

from __future__ import annotations

from ksana.errors import InvariantViolated
from ksana.loading import prefix
from ksana.loading.activation import Activation
from ksana.loading.estimate import is_worth_it
from ksana.loading.load import Load
from ksana.loading.orders import StoreOrders
from ksana.loading.settings import LoaderSettings
from ksana.loading.state import LoaderState, Operation
from ksana.messages.base import RequestId
from ksana.messages.remote import (
    AllocateBlocksForRemoteCache,
    CancelLoad,
    ConfirmRemoteCacheLoadingResult,
    DropRemoteCacheLoading,
    GetRequestPrefixBlockNumberBeforeRemoteCacheLoading,
    LoadOutcome,
    LoadPrefix,
    PrefixBlockNumber,
    PrefixLoaded,
    RemoteBlocksAllocated,
    RemoteCallRefused,
    RemoteLoadingConfirmed,
)
from ksana.messages.staging import CopyFromStaging, StagedBlock
from ksana.messages.stores import StoreFetched, StoreFound

ANSWER_MARGIN_S = 0.05
"""Orders end so long before the load does, so that what came in the last moment is still used."""

_CALL_OF = {
    "probing": "GetRequestPrefixBlockNumberBeforeRemoteCacheLoading",
    "reserving": "AllocateBlocksForRemoteCache",
    "confirming": "ConfirmRemoteCacheLoadingResult",
}


class Loads:
    """All loads. Every method is one event; it changes one load, and says what follows."""

    def __init__(self, settings: LoaderSettings, state: LoaderState, orders: StoreOrders) -> None:
        self._settings = settings
        self._state = state
        self._orders = orders

    # from the scheduler

    def begin(self, out: Activation, request: LoadPrefix) -> None:
        settings = self._settings
        if request.request_id in self._state.loads:
            raise InvariantViolated(f"request {request.request_id} is being loaded already")
        load = Load(load_id=self._state.new_id(), request=request)
        self._state.loads[request.request_id] = load
        if request.pool_epoch != self._state.pool_epoch:
            self._end(out, load, "reset")
        elif not self._orders.allowed:
            self._end(out, load, "store_failed")
        elif prefix.max_blocks(settings, request) == 0:
            self._end(out, load, "nothing")
        else:
            out.allocator(
                GetRequestPrefixBlockNumberBeforeRemoteCacheLoading(
                    pool_epoch=request.pool_epoch,
                    request_id=request.request_id,
                    token_ids=request.token_ids,
                    cache_salt=request.cache_salt,
                    num_reserved_tokens=request.num_reserved_tokens,
                    resumed=request.resumed,
                )
            )

    def cancel(self, out: Activation, message: CancelLoad) -> None:
        """Nothing to do for a load that is over: the two messages crossed."""
        load = self._state.loads.get(message.request_id)
        if load is None:
            return
        load.cancelled = True
        if load.state in ("finding", "fetching"):
            self._drop(out, load, "cancelled")
        elif load.state in ("probing", "reserving"):
            load.state = "draining"

    def reset(self, out: Activation) -> None:
        """The pools are empty, and the allocator has forgotten all loads."""
        for load in list(self._state.loads.values()):
            self._end(out, load, "cancelled" if load.cancelled else "reset")

    # from the allocator

    def probed(self, out: Activation, answer: PrefixBlockNumber) -> None:
        load = self._waiting(answer.request_id, "probing")
        if load is None:
            return
        if load.state == "draining":
            self._drop(out, load, "cancelled")
            return
        settings = self._settings
        load.state = "finding"
        load.local_fa, load.local_cached = answer.fa_block_num, answer.swa_block_num
        load.swa_valid = answer.swa_valid
        load.keys = prefix.chain_keys_of(settings, load.request)
        wanted = prefix.keys_to_find(settings, load)
        if load.local_cached >= len(load.keys) or not wanted:
            self._confirm(out, load, "nothing")
        elif not self._orders.allowed or out.now_s >= self._orders_end_s(load):
            self._confirm(out, load, "store_failed")
        else:
            self._orders.find(out, load.load_id, wanted, self._orders_end_s(load))

    def reserved(self, out: Activation, answer: RemoteBlocksAllocated) -> None:
        load = self._waiting(answer.request_id, "reserving")
        if load is None:
            return
        if load.state == "draining":
            self._drop(out, load, "cancelled")
            return
        assert load.choice is not None
        load.state = "fetching"
        load.num_reserved_fa = len(answer.fa_block_ids)
        load.wanted = prefix.wanted_blocks(self._settings, load, load.choice, answer)
        load.began_s = out.now_s
        # Blocks without bytes are here as soon as they are reserved.
        if not self._settings.fa_block_bytes:
            load.fa_here = set(range(load.local_fa, load.choice.num_fa_blocks))

    def confirmed(self, out: Activation, answer: RemoteLoadingConfirmed) -> None:
        load = self._waiting(answer.request_id, "confirming")
        if load is None:
            return
        if load.cancelled:
            self._drop(out, load, "cancelled")
            return
        self._state.counters.num_loaded_tokens += answer.num_remote_blocks * self._settings.block_size
        self._end(
            out,
            load,
            load.outcome,
            holds_blocks=True,
            num_cached_tokens=answer.cached_blocks * self._settings.block_size,
            num_remote_tokens=answer.num_remote_blocks * self._settings.block_size,
        )

    def refused(self, out: Activation, answer: RemoteCallRefused) -> None:
        load = self._state.loads.get(answer.request_id)
        if load is None or (load.state != "draining" and _CALL_OF.get(load.state) != answer.call):
            self._state.counters.num_late_answers += 1
            return
        if answer.reason != "no_room":
            out.log("error", f"{answer.call} for request {answer.request_id} was refused: {answer.detail}")
        if answer.call == "GetRequestPrefixBlockNumberBeforeRemoteCacheLoading":
            self._end(out, load, "cancelled" if load.cancelled else "no_room")
        else:
            self._drop(out, load, "cancelled" if load.cancelled else "no_room")

    # from the store

    def found(self, out: Activation, operation: Operation, answer: StoreFound) -> None:
        load = self._owner(operation, "finding")
        if load is None:
            return
        if answer.error is not None:
            load.error = answer.error
            self._confirm(out, load, "store_failed")
            return
        choice = prefix.choose(self._settings, load, dict(zip(operation.keys, answer.found, strict=True)))
        num_tokens = (choice.endpoint - load.local_cached) * self._settings.block_size
        load_s = self._state.speed.load_s(prefix.num_bytes(self._settings, load, choice), out.now_s)
        if num_tokens <= 0:
            self._confirm(out, load, "nothing")
        elif not is_worth_it(load_s, num_tokens, load.request.prefill_tokens_per_s):
            self._confirm(out, load, "not_worth_it")
        else:
            load.state = "reserving"
            load.choice = choice
            out.allocator(
                AllocateBlocksForRemoteCache(
                    pool_epoch=load.request.pool_epoch,
                    request_id=load.request.request_id,
                    fa_block_num=choice.num_fa_blocks - load.local_fa,
                    swa_block_num=len(choice.swa_indices),
                )
            )

    def fetched(self, out: Activation, operation: Operation, answer: StoreFetched) -> None:
        """Hands what came to the worker, and frees the slots of what did not."""
        load = self._owner(operation, "fetching")
        if load is None:
            self._state.free_load_slots += [stored.slot for stored in operation.blocks]
            return
        load.num_orders -= 1
        if answer.error is not None and load.error is None and not _is_fault_of_keys(answer):
            load.error = answer.error
        staged: list[StagedBlock] = []
        for wanted, stored, result in zip(operation.wanted, operation.blocks, answer.results, strict=True):
            if result != "ok":
                self._state.free_load_slots.append(stored.slot)
                continue
            staged.append(StagedBlock(pool=wanted.pool, block_id=wanted.block_id, slot=stored.slot))
            (load.fa_here if wanted.pool == "fa" else load.swa_here).add(wanted.index)
            load.num_bytes += stored.num_bytes
            self._state.counters.num_loaded_bytes += stored.num_bytes
        if staged:
            copy_id = self._state.new_id()
            self._state.copies[copy_id] = tuple(block.slot for block in staged)
            self._state.counters.num_loaded_blocks += len(staged)
            out.executor(
                CopyFromStaging(pool_epoch=load.request.pool_epoch, copy_id=copy_id, blocks=tuple(staged))
            )

    # time

    def next_timer_s(self) -> float | None:
        return min(
            (
                load.request.give_up_at_s
                for load in self._state.loads.values()
                if load.state in ("finding", "fetching")
            ),
            default=None,
        )

    def go_on(self, out: Activation) -> None:
        """Order what may be ordered now; end what is complete, hopeless, or out of time."""
        for load in list(self._state.loads.values()):
            late = out.now_s >= load.request.give_up_at_s
            if load.state == "finding" and late:
                load.error = "the load's time was over"
                self._confirm(out, load, "store_failed")
            elif load.state == "fetching":
                if late:
                    load.error = load.error or "the load's time was over"
                else:
                    self._order(out, load)
                ended = load.num_orders == 0 and (self._is_complete(load) or self._cannot_go_on(out, load))
                # Orders may wait for others in the port. Once the store is given up, no load waits for them.
                given_up = load.num_orders > 0 and not self._orders.allowed
                if given_up:
                    load.error = load.error or "the remote cache does not work"
                if late or ended or given_up:
                    self._confirm_fetched(out, load)

    def _order(self, out: Activation, load: Load) -> None:
        settings, free = self._settings, self._state.free_load_slots
        while (
            free
            and not self._is_complete(load)
            and not self._cannot_go_on(out, load)
            and load.num_orders < settings.fetches_in_flight
        ):
            piece = load.wanted[load.num_ordered :][: min(settings.blocks_per_fetch, len(free))]
            load.num_ordered += len(piece)
            load.num_orders += 1
            slots = [free.pop() for _ in piece]
            self._orders.fetch(out, load.load_id, zip(piece, slots, strict=True), self._orders_end_s(load))

    def _is_complete(self, load: Load) -> bool:
        return load.num_ordered == len(load.wanted)

    def _cannot_go_on(self, out: Activation, load: Load) -> bool:
        return not self._orders.allowed or out.now_s >= self._orders_end_s(load)

    def _orders_end_s(self, load: Load) -> float:
        return load.request.give_up_at_s - ANSWER_MARGIN_S

    # ends

    def _confirm_fetched(self, out: Activation, load: Load) -> None:
        num_come = len(load.fa_here) + len(load.swa_here)
        if load.num_bytes:
            self._state.speed.loaded(load.num_bytes, out.now_s - load.began_s, out.now_s)
        outcome: LoadOutcome = "partial"
        if all(
            block.index in (load.fa_here if block.pool == "fa" else load.swa_here) for block in load.wanted
        ):
            outcome = "loaded"
        elif num_come == 0:
            outcome = "store_failed" if load.error else "nothing"
        self._confirm(out, load, outcome)

    def _confirm(self, out: Activation, load: Load, outcome: LoadOutcome) -> None:
        """Make the best of what there is: the local hit, and what has come."""
        if load.error is not None and self._orders.allowed:
            # While the store is not used, one line has said so already.
            out.log(
                "warning",
                f"request {load.request.request_id}: {load.num_bytes} bytes came from the remote cache, "
                f"the rest is computed: {load.error}",
            )
        load.state, load.outcome = "confirming", outcome
        matched = load.num_leading_fa()
        swa_indices = load.choice.swa_indices if load.choice is not None else ()
        out.allocator(
            ConfirmRemoteCacheLoadingResult(
                pool_epoch=load.request.pool_epoch,
                request_id=load.request.request_id,
                matched_block_index=matched,
                matched_remote_swa_block_indexs=tuple(
                    index if index in load.swa_here and index < matched else -1 for index in swa_indices
                ),
                reserved_block_num=load.local_fa + load.num_reserved_fa - matched,
            )
        )

    def _drop(self, out: Activation, load: Load, outcome: LoadOutcome) -> None:
        request = load.request
        out.allocator(DropRemoteCacheLoading(pool_epoch=request.pool_epoch, request_id=request.request_id))
        self._end(out, load, outcome)

    def _end(
        self,
        out: Activation,
        load: Load,
        outcome: LoadOutcome,
        *,
        holds_blocks: bool = False,
        num_cached_tokens: int = 0,
        num_remote_tokens: int = 0,
    ) -> None:
        """The one PrefixLoaded of the load."""
        request = load.request
        del self._state.loads[request.request_id]
        num_loads = self._state.counters.num_loads
        num_loads[outcome] = num_loads.get(outcome, 0) + 1
        out.scheduler(
            PrefixLoaded(
                pool_epoch=request.pool_epoch,
                request_id=request.request_id,
                outcome=outcome,
                holds_blocks=holds_blocks,
                num_cached_tokens=num_cached_tokens,
                num_remote_tokens=num_remote_tokens,
            )
        )

    # what a load is after

    def _waiting(self, request_id: RequestId, state: str) -> Load | None:
        """The load that waits in `state` (or drains from it) for what has come; None counts as late."""
        load = self._state.loads.get(request_id)
        if load is not None and (load.state == state or (load.state == "draining" and state != "confirming")):
            return load
        self._state.counters.num_late_answers += 1
        return None

    def _owner(self, operation: Operation, state: str) -> Load | None:
        for load in self._state.loads.values():
            if load.load_id == operation.owner and load.state == state:
                return load
        self._state.counters.num_late_answers += 1
        return None


def _is_fault_of_keys(answer: StoreFetched) -> bool:
    """What did not come could not, but the store is well: it is computed, without a line for each request."""
    return not answer.timed_out and not {"failed", "corrupt"} & set(answer.results)
