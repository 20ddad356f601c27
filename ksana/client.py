"""The way into an engine: one `Client`, used alike by the gateway, scripts, benchmarks and replay.

    async with client.generate(TextPrompt(text="Hello"), SamplingParams(seed=1)) as events:
        async for event in events:      # PromptAccepted, TextDelta..., Ended
            ...

A plain `async for event in client.generate(...)` works too. Whoever stops listening early, in whatever
way (break, exception, cancellation, or just dropping the stream), aborts the request: its KV is freed
within a step.
"""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Protocol

import trio

from ksana.errors import ServiceError
from ksana.messages.base import Message, RequestId
from ksana.messages.outputs import Ended, OutputEvent
from ksana.messages.requests import Abort, Generate, Prompt, SamplingParams
from ksana.messages.status import EngineStatus, ModelInfo
from ksana.runtime.actor import Post
from ksana.runtime.clock import now_s
from ksana.runtime.slots import Slot, Slots


class OutputStream(Protocol):
    """The events of one request, in order; the last one is `Ended`. For one reader."""

    @property
    def request_id(self) -> RequestId: ...

    def __aiter__(self) -> OutputStream: ...

    async def __anext__(self) -> OutputEvent:
        """The next event; waits for it. Raises StopAsyncIteration after `Ended`."""
        ...

    async def take(self) -> list[OutputEvent]:
        """All events that are waiting, at least one: what a gateway puts into one chunk.

        Empty after `Ended`.
        """
        ...

    def close(self) -> None:
        """Stop listening; aborts the request if it has not ended. May be called twice."""
        ...

    async def __aenter__(self) -> OutputStream: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Client(Protocol):
    """What an engine offers. All methods are called on the engine's trio thread."""

    @property
    def model(self) -> ModelInfo: ...

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        timeout_s: float | None = None,
        cache_salt: str = "",
        external_id: str = "",
    ) -> OutputStream:
        """Ask for tokens. Does not wait.

        Raises ServiceError at once: 429 when every slot is taken, 503 when the engine is draining or
        broken. What is wrong with the prompt itself comes as the only event, `Ended` with a `Failed`.
        `timeout_s` is how long the request may take in all; default is the engine's request timeout.
        """
        ...

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """The ids that `generate` would use for this prompt. Raises RequestError."""
        ...

    async def detokenize(self, token_ids: tuple[int, ...], skip_special_tokens: bool = False) -> str:
        """The text of ids. Raises RequestError for an id outside the vocabulary."""
        ...

    def status(self) -> EngineStatus: ...


class SlotStream:
    """An `OutputStream` over a slot of an engine in this process.

    `close` is synchronous, so that an abort is sent even while the reader is being cancelled; `__del__`
    closes too, so that leaving an `async for` by break or exception does.
    """

    def __init__(self, slots: Slots, slot: Slot, post: Post) -> None:
        self._slots = slots
        self._slot = slot
        self._post = post
        self._waiting: list[OutputEvent] = []
        self._done = False
        self._closed = False
        self._trio = trio.lowlevel.current_trio_token()

    @property
    def request_id(self) -> RequestId:
        return self._slot.request_id

    def __aiter__(self) -> SlotStream:
        return self

    async def __anext__(self) -> OutputEvent:
        if not self._waiting:
            self._waiting = (await self.take())[::-1]
            if not self._waiting:
                raise StopAsyncIteration
        return self._waiting.pop()

    async def take(self) -> list[OutputEvent]:
        if self._waiting:
            events, self._waiting = self._waiting[::-1], []
            return events
        if self._done or self._closed:
            return []
        try:
            events = await self._slot.take()
        except BaseException:
            self.close()
            raise
        if isinstance(events[-1], Ended):
            self._done = True
            self.close()
        return events

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if not self._slot.ended:
            self._post(Abort(request_id=self._slot.request_id))
        self._slots.close(self._slot)

    async def __aenter__(self) -> SlotStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._closed:
            return
        try:
            here = trio.lowlevel.current_trio_token()
        except RuntimeError:
            here = None
        if here is self._trio:
            self.close()
            return
        with contextlib.suppress(trio.RunFinishedError):
            # Collected on another thread: closing is the trio thread's business.
            self._trio.run_sync_soon(self.close)


class TokenizerPort(Protocol):
    """How prompts become ids and ids text outside a request. May run in a thread; raises RequestError."""

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]: ...

    async def detokenize(self, token_ids: tuple[int, ...], skip_special_tokens: bool) -> str: ...


class StatusPort(Protocol):
    """What the client needs to know of the engine behind it."""

    def status(self) -> EngineStatus: ...

    def refusal(self) -> ServiceError | None:
        """Why no new request is taken, or None."""
        ...


class InProcessClient:
    """A `Client` for the engine in this process."""

    def __init__(
        self,
        *,
        model: ModelInfo,
        slots: Slots,
        post: Post,
        tokenizer: TokenizerPort,
        engine: StatusPort,
        default_timeout_s: float,
    ) -> None:
        self._model = model
        self._slots = slots
        self._post = post
        self._tokenizer = tokenizer
        self._engine = engine
        self._default_timeout_s = default_timeout_s

    @property
    def model(self) -> ModelInfo:
        return self._model

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        timeout_s: float | None = None,
        cache_salt: str = "",
        external_id: str = "",
    ) -> SlotStream:
        refusal = self._engine.refusal()
        if refusal is not None:
            raise refusal
        now = now_s()
        slot = self._slots.open()
        message: Message = Generate(
            request_id=slot.request_id,
            prompt=prompt,
            sampling=sampling,
            arrival_time_s=now,
            deadline_s=now + (self._default_timeout_s if timeout_s is None else timeout_s),
            cache_salt=cache_salt,
            external_id=external_id,
        )
        try:
            self._post(message)
        except BaseException:
            self._slots.discard(slot)
            raise
        return SlotStream(self._slots, slot, self._post)

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        return await self._tokenizer.tokenize(prompt)

    async def detokenize(self, token_ids: tuple[int, ...], skip_special_tokens: bool = False) -> str:
        return await self._tokenizer.detokenize(token_ids, skip_special_tokens)

    def status(self) -> EngineStatus:
        return self._engine.status()
