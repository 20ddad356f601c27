"""A `ksana.client.Client` whose engine is a script: what each request says is up to the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import trio

from ksana.client import SlotStream
from ksana.errors import RequestError, ServiceError
from ksana.messages.base import Message
from ksana.messages.blocks import CacheCounters, PoolUse
from ksana.messages.outputs import Ended, Failed, Finished, OutputEvent, PromptAccepted, TextDelta, Usage
from ksana.messages.requests import Abort, ChatPrompt, Generate, Prompt, SamplingParams, TextPrompt
from ksana.messages.status import EngineStatus, ModelInfo, SchedulerCounters
from ksana.runtime.slots import Slots
from ksana.tokenizers.prompts import CONTEXT_LENGTH_EXCEEDED, EMPTY_PROMPT

Script = Callable[[Generate], AsyncIterator[OutputEvent]]

MODEL = ModelInfo(
    name="fake",
    path="/nowhere",
    fingerprint="00",
    family="llama",
    dtype="float32",
    vocab_size=1000,
    max_model_len=2048,
    block_size=16,
    num_fa_blocks=100,
    num_swa_blocks=0,
    kv_cache_bytes=1 << 20,
)

USE = PoolUse(num_blocks=100, num_free=60, num_cached=15, num_referenced=20, num_deferred=5)


def ids_of(prompt: Prompt) -> tuple[int, ...]:
    """A toy tokenizer: one id per character."""
    if isinstance(prompt, TextPrompt):
        return tuple(ord(letter) % 1000 for letter in prompt.text)
    if isinstance(prompt, ChatPrompt):
        return tuple(ord(letter) % 1000 for one in prompt.messages for letter in one.content)
    return prompt.token_ids


def too_long(num_tokens: int, max_model_len: int) -> RequestError:
    """What the real tokenizer raises."""
    text = f"The prompt has {num_tokens} tokens and the context {max_model_len} (max_model_len)."
    return RequestError(text, param="prompt", code=CONTEXT_LENGTH_EXCEEDED)


def says(
    *texts: str, reason: str = "length", stop_reason: str | int | None = None, pause_s: float = 0.0
) -> Script:
    """Accept, then one delta of one token per text, then finish."""

    async def script(asked: Generate) -> AsyncIterator[OutputEvent]:
        ids = ids_of(asked.prompt)
        yield accepted(asked)
        for index, text in enumerate(texts):
            await trio.sleep(pause_s)
            yield TextDelta(request_id=asked.request_id, text=text, token_ids=(index,))
        yield Ended(
            request_id=asked.request_id,
            outcome=Finished(reason=reason, stop_reason=stop_reason),  # type: ignore[arg-type]
            usage=Usage(num_prompt_tokens=len(ids), num_output_tokens=len(texts), num_cached_tokens=1),
        )

    return script


def accepted(asked: Generate) -> PromptAccepted:
    return PromptAccepted(
        request_id=asked.request_id,
        prompt_token_ids=ids_of(asked.prompt),
        max_tokens=asked.sampling.max_tokens or 99,
    )


def fails(failed: Failed, *texts: str, accept: bool = False) -> Script:
    """Say some texts, then fail."""

    async def script(asked: Generate) -> AsyncIterator[OutputEvent]:
        if texts or accept:
            yield accepted(asked)
        for index, text in enumerate(texts):
            yield TextDelta(request_id=asked.request_id, text=text, token_ids=(index,))
            await trio.sleep(0.01)
        yield Ended(
            request_id=asked.request_id,
            outcome=failed,
            usage=Usage(num_prompt_tokens=0, num_output_tokens=len(texts)),
        )

    return script


def endless(text: str = "x", pause_s: float = 0.001) -> Script:
    """Never stops talking."""

    async def script(asked: Generate) -> AsyncIterator[OutputEvent]:
        yield accepted(asked)
        while True:
            yield TextDelta(request_id=asked.request_id, text=text, token_ids=(1,))
            await trio.sleep(pause_s)

    return script


async def silent(asked: Generate) -> AsyncIterator[OutputEvent]:
    """Accepts, then says nothing more."""
    yield accepted(asked)
    await trio.sleep_forever()


@dataclass
class FakeClient:
    """Runs `script` for each request, in `nursery`, over real slots."""

    nursery: trio.Nursery
    script: Script = field(default_factory=lambda: says("Hello", " world"))
    capacity: int = 1000
    model: ModelInfo = MODEL
    asked: list[Generate] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    refusal: ServiceError | None = None

    def __post_init__(self) -> None:
        self.slots = Slots(self.capacity)
        self._scopes: dict[int, trio.CancelScope] = {}
        self.state = EngineStatus(
            now_s=100.0,
            last_progress_s=99.0,
            num_open_slots=0,
            num_running=3,
            num_waiting=2,
            fa_use=USE,
            swa_use=None,
            cache=CacheCounters(num_queried_tokens=50, num_hit_tokens=20),
            counters=SchedulerCounters(
                num_prompt_tokens=70,
                num_output_tokens=30,
                num_preemptions=4,
                num_stopped=5,
                num_length=4,
                num_failed=2,
                num_aborted=5,
            ),
            worker_state="ready",
            worker_epoch=1,
            num_worker_restarts=2,
        )

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        timeout_s: float | None = None,
        cache_salt: str = "",
        external_id: str = "",
    ) -> SlotStream:
        if self.refusal is not None:
            raise self.refusal
        slot = self.slots.open()
        asked = Generate(
            request_id=slot.request_id,
            prompt=prompt,
            sampling=sampling,
            arrival_time_s=trio.current_time(),
            deadline_s=trio.current_time() + (timeout_s or 0),
            cache_salt=cache_salt,
            external_id=external_id,
        )
        self.asked.append(asked)
        self.nursery.start_soon(self._play, asked)
        return SlotStream(self.slots, slot, self._post)

    async def _play(self, asked: Generate) -> None:
        with trio.CancelScope() as self._scopes[asked.request_id]:
            async for event in self.script(asked):
                self.slots.post(event)
                if isinstance(event, Ended):
                    break

    def _post(self, message: Message) -> None:
        assert isinstance(message, Abort)
        self.aborted.append(message.request_id)
        if scope := self._scopes.get(message.request_id):
            scope.cancel()

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        ids = ids_of(prompt)
        if not ids:
            raise RequestError("the prompt is empty", param="prompt", code=EMPTY_PROMPT)
        if len(ids) >= self.model.max_model_len:
            raise too_long(len(ids), self.model.max_model_len)
        return ids

    async def detokenize(self, token_ids: Sequence[int], _skip: bool = False) -> str:
        if any(token >= self.model.vocab_size for token in token_ids):
            raise RequestError(
                f"a token id is outside the vocabulary ({self.model.vocab_size})", param="prompt"
            )
        return "".join(map(chr, token_ids))

    def status(self) -> EngineStatus:
        return self.state

    def change_status(self, **changes: object) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)
