"""Orders to the store and their answers: what the loader learns of the store's health, speed and contents."""

from __future__ import annotations

from collections.abc import Iterable

from ksana.loading.activation import Activation
from ksana.loading.breaker import BreakerSettings, CallWeight, CircuitBreaker
from ksana.loading.known_keys import KnownKeys
from ksana.loading.load import WantedBlock
from ksana.loading.settings import LoaderSettings
from ksana.loading.state import LoaderState, Operation
from ksana.messages.stores import (
    StoredBlock,
    StoreFetch,
    StoreFetched,
    StoreFind,
    StoreFound,
    StoreSave,
    StoreSaved,
)

StoreAnswer = StoreFound | StoreFetched | StoreSaved

_NOT_THERE = ("missing", "corrupt", "unusable")
PROBE_KEY = b"ksana probe"
PROBE_TIMEOUT_S = 1.0


class StoreOrders:
    """Gives orders, and takes answers before whoever gave the order sees them."""

    def __init__(self, settings: LoaderSettings, state: LoaderState) -> None:
        self._settings = settings
        self._state = state
        self._breaker = CircuitBreaker(BreakerSettings(probe_timeout_s=PROBE_TIMEOUT_S + 1.0), state.breaker)
        self._save_breaker = CircuitBreaker(state=state.save_breaker)
        self.known_keys = KnownKeys(state.known_keys, settings.max_known_keys)

    @property
    def allowed(self) -> bool:
        """Whether the store is used at the moment."""
        return self._breaker.allows

    @property
    def takes_saves(self) -> bool:
        """Whether the store, as long as it is used, is written to: one that is full may well be read."""
        return self._save_breaker.allows

    def next_timer_s(self) -> float | None:
        return self._breaker.next_timer_s()

    def find(self, out: Activation, owner: int, keys: tuple[bytes, ...], deadline_s: float) -> None:
        fair_s = out.now_s + self._settings.find_timeout_s
        op_id = self._begin(Operation(kind="find", owner=owner, keys=keys, is_cut_short=deadline_s < fair_s))
        deadline_s = min(deadline_s, fair_s)
        out.store(StoreFind(op_id=op_id, keys=keys, deadline_s=deadline_s))

    def fetch(
        self, out: Activation, owner: int, wanted: Iterable[tuple[WantedBlock, int]], deadline_s: float
    ) -> None:
        """`wanted`: blocks and the slots they go to."""
        pairs = tuple(wanted)
        blocks = tuple(
            StoredBlock(key=block.key, slot=slot, num_bytes=block.num_bytes) for block, slot in pairs
        )
        op_id = self._begin(
            Operation(kind="fetch", owner=owner, blocks=blocks, wanted=tuple(block for block, _ in pairs))
        )
        timeout_s = self._settings.fetch_timeout_s
        out.store(StoreFetch(op_id=op_id, blocks=blocks, deadline_s=deadline_s, timeout_s=timeout_s))

    def save(self, out: Activation, owner: int, blocks: tuple[StoredBlock, ...]) -> None:
        op_id = self._begin(Operation(kind="save", owner=owner, blocks=blocks))
        deadline_s = out.now_s + self._settings.save_timeout_s
        out.store(StoreSave(op_id=op_id, blocks=blocks, deadline_s=deadline_s))

    def probe_if_due(self, out: Activation) -> None:
        if self._breaker.start_probe(out.now_s):
            op_id = self._begin(Operation(kind="probe"))
            deadline_s = out.now_s + PROBE_TIMEOUT_S
            out.store(StoreFind(op_id=op_id, keys=(PROBE_KEY,), deadline_s=deadline_s))
        if self._save_breaker.start_probe(out.now_s):
            # Only a save can show that saves work, and the next one does: nobody waits for it.
            self._save_breaker.probe_succeeded()
        self._keep_breakers()

    def take(self, out: Activation, answer: StoreAnswer) -> Operation | None:
        """The order that this answers, or None if there is none that anybody but us waits for."""
        operation = self._state.operations.pop(answer.op_id, None)
        if operation is None:
            self._state.counters.num_late_answers += 1
            return None
        was_allowed, took_saves = self.allowed, self.takes_saves
        if operation.kind == "probe":
            self._take_probe(out, answer)
        else:
            self._judge(out, operation, answer)
            self._learn(operation, answer)
        if was_allowed and not self.allowed:
            out.log("warning", f"the remote cache is not used until it answers again: {answer.error}")
        if took_saves and not self.takes_saves:
            wait_s = self._save_breaker.state.wait_s
            out.log("warning", f"nothing is saved in the remote cache for {wait_s:.0f} s: {answer.error}")
        self._keep_breakers()
        return None if operation.kind == "probe" else operation

    def _begin(self, operation: Operation) -> int:
        op_id = self._state.new_id()
        self._state.operations[op_id] = operation
        return op_id

    def _keep_breakers(self) -> None:
        self._state.breaker = self._breaker.state
        self._state.save_breaker = self._save_breaker.state

    def _take_probe(self, out: Activation, answer: StoreAnswer) -> None:
        if answer.error is not None:
            self._breaker.probe_failed(out.now_s)
        else:
            self._breaker.probe_succeeded()
            out.log("info", "the remote cache answers again and is used")

    def _judge(self, out: Activation, operation: Operation, answer: StoreAnswer) -> None:
        counters = self._state.counters
        breaker = self._save_breaker if isinstance(answer, StoreSaved) else self._breaker
        weight: CallWeight = "light" if isinstance(answer, StoreFound) else "heavy"
        failed = answer.error is not None
        if not isinstance(answer, StoreFound):
            num_corrupt = sum(result == "corrupt" for result in answer.results)
            counters.num_corrupt_blocks += num_corrupt
            counters.num_missing_blocks += sum(result == "missing" for result in answer.results)
            failed = "failed" in answer.results
            self._count_unusable(out, answer)
            if num_corrupt:
                out.log("warning", f"the remote cache gave {num_corrupt} damaged blocks: {answer.error}")
        if answer.timed_out:
            counters.num_store_timeouts += 1
            if isinstance(answer, StoreFetched) and answer.seconds == 0:
                pass  # its turn never came: that says how much was ordered, and nothing of the store
            elif self._was_cut_short(operation, answer):
                breaker.failed(out.now_s, weight)
            else:
                breaker.timed_out(out.now_s)
        elif failed:
            counters.num_store_errors += 1
            breaker.failed(out.now_s, weight)
        elif isinstance(answer, StoreFound) or any(result != "unusable" for result in answer.results):
            breaker.succeeded(weight)

    def _count_unusable(self, out: Activation, answer: StoreFetched | StoreSaved) -> None:
        """The fault of single keys, which says nothing of the store. A line for the first, the tenth, ..."""
        counters = self._state.counters
        before = counters.num_unusable_blocks
        counters.num_unusable_blocks += sum(result == "unusable" for result in answer.results)
        now = counters.num_unusable_blocks
        if now > before and (before == 0 or len(str(now)) > len(str(before))):
            out.log(
                "warning",
                f"so far {now} blocks could not be used for what stands in their places in the remote cache, "
                f"the others are: {answer.error}",
            )

    def _was_cut_short(self, operation: Operation, answer: StoreAnswer) -> bool:
        """Whether the load ended before the store could be blamed for being late."""
        if isinstance(answer, StoreFetched):
            return answer.seconds < self._settings.fetch_timeout_s * 0.99  # clocks round
        return operation.is_cut_short

    def _learn(self, operation: Operation, answer: StoreAnswer) -> None:
        if isinstance(answer, StoreFound):
            if answer.error is None:
                found = zip(operation.keys, answer.found, strict=True)
                self.known_keys.add(key for key, there in found if there)
                missing = zip(operation.keys, answer.found, strict=True)
                self.known_keys.discard(key for key, there in missing if not there)
            return
        results = list(zip(operation.blocks, answer.results, strict=True))
        self.known_keys.discard(block.key for block, result in results if result in _NOT_THERE)
        if isinstance(answer, StoreFetched) and not answer.timed_out:
            # Maybe the store is only out of reach, but it may have values that it can never read: those are
            # to be written anew, and a needless write costs little.
            self.known_keys.discard(block.key for block, result in results if result == "failed")
        if isinstance(answer, StoreSaved):
            self.known_keys.add(block.key for block, result in results if result == "ok")
