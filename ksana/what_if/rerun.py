"""The recorded requests once more, through the real scheduler and allocators, on a virtual clock.

Requests arrive, and clients leave, when they did; outputs are the recorded ones. What was never sampled,
because its client had left, is made up from an id that ends nothing. A step takes what the fitted cost says.
There is no remote cache, and the prefix cache begins empty.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import trio

from ksana.actors.device_executor import DeviceExecutor
from ksana.costs.step_cost import StepCost
from ksana.devices.simulated import SimulatedBackend
from ksana.devices.simulated_worker import KnownRequest, SimulatedWorker
from ksana.errors import InvariantViolated
from ksana.journal.format import RecordedSettings
from ksana.journal.requests import RecordedRequest
from ksana.messages.base import Message, RequestId
from ksana.messages.outputs import StepOutputs
from ksana.messages.requests import Abort, AddRequest
from ksana.runtime.actor import Address, Said
from ksana.runtime.deterministic import run_deterministic
from ksana.runtime.virtual_clock import VirtualClock
from ksana.what_if.figures import Figures
from ksana.wiring import Cores, Mailboxes, run_deciders

_STEP_TIMEOUT_S = 1e9
_PATIENCE_S = 1e6
"""Virtual seconds after the last arrival: with deadlines, everything ends long before."""


def rerun(requests: Sequence[RecordedRequest], settings: RecordedSettings, cost: StepCost) -> Figures:
    """Run them to their ends. Every request must have `added_s`. Deterministic."""
    first_s = min((request.arrival_s for request in requests), default=0.0)

    async def main() -> Figures:
        return await _Rerun(requests, settings, cost).run()

    return run_deterministic(0, main, VirtualClock(start_s=first_s))


class _Rerun:
    def __init__(
        self, requests: Sequence[RecordedRequest], settings: RecordedSettings, cost: StepCost
    ) -> None:
        self.requests = {request.request_id: request for request in requests}
        self.settings = settings
        self.figures = Figures()
        self.num_open = len(requests)
        self.all_ended = trio.Event()
        self.num_told: dict[RequestId, int] = {}
        """Output tokens of requests that a stop string ends."""
        self.mailboxes = Mailboxes(len(requests), 0)
        self.cores = Cores.fresh(settings.scheduler, settings.cache)
        self.filler = _filler(requests, settings.vocab_size)
        self.executor = DeviceExecutor(
            SimulatedBackend(
                lambda: SimulatedWorker.of_cache(settings.cache, self._token),
                cost=cost,
                is_up_at_first=True,
            ),
            self.mailboxes.executor,
            scheduler=self.mailboxes.scheduler.put,
            step_timeout_s=_STEP_TIMEOUT_S,
        )

    async def run(self) -> Figures:
        if not self.requests:
            return self.figures
        await self.executor.start_first()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.executor.run)
            nursery.start_soon(self._run_deciders)
            nursery.start_soon(self._ask)
            await self.all_ended.wait()
            nursery.cancel_scope.cancel()
        await self.executor.stop()
        return self.figures

    async def _run_deciders(self) -> None:
        await run_deciders(
            self.cores,
            self.mailboxes,
            tokenizer=self._take,
            executor=self.mailboxes.executor.put,
            is_idle=lambda: False,
            tap=self._tap,
        )

    async def _ask(self) -> None:
        """Send requests and aborts at their recorded times."""
        events: list[tuple[float, int, Message]] = []
        for number, request in enumerate(self.requests.values()):
            assert request.added_s is not None
            events.append((request.added_s, 2 * number, _message(request)))
            if request.aborted_s is not None:
                abort = Abort(request_id=request.request_id)
                events.append((request.aborted_s, 2 * number + 1, abort))
        heapq.heapify(events)
        while events:
            at_s, _, message = heapq.heappop(events)
            await trio.sleep_until(at_s)
            self.mailboxes.scheduler.put(message)
        await trio.sleep(_PATIENCE_S)
        raise InvariantViolated(f"{self.num_open} requests never ended")

    def _tap(self, actor: Address, now_s: float, messages: Sequence[Message], said: Sequence[Said]) -> None:
        if actor == "scheduler":
            for message in messages:
                self.figures.hear(message)
            for _, message in said:
                self.figures.say(message, now_s)

    def _take(self, message: Message) -> None:
        """What the tokenizer would hear: it finds the stop strings that were found."""
        assert isinstance(message, StepOutputs)
        for tokens in message.tokens:
            stop = self.requests[tokens.request_id].stop
            if stop is not None:
                before = self.num_told.get(tokens.request_id, 0)
                self.num_told[tokens.request_id] = before + len(tokens.token_ids)
                if before <= stop.token_index < before + len(tokens.token_ids):
                    self.mailboxes.scheduler.put(stop)
        self.num_open -= len(message.ended)
        if self.num_open == 0:
            self.all_ended.set()

    def _token(self, known: KnownRequest, position: int) -> int:
        recorded = self.requests[known.request_id].output_token_ids
        return recorded[position] if position < len(recorded) else self.filler


def _message(request: RecordedRequest) -> AddRequest:
    return AddRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        eos_token_ids=request.eos_token_ids,
        arrival_time_s=request.arrival_s,
        deadline_s=request.deadline_s,
        cache_salt=request.cache_salt,
    )


def _filler(requests: Sequence[RecordedRequest], vocab_size: int) -> int:
    """An id that ends no request."""
    ending = {i for request in requests for i in (*request.eos_token_ids, *request.sampling.stop_token_ids)}
    return next(token_id for token_id in range(vocab_size + len(ending) + 1) if token_id not in ending)
