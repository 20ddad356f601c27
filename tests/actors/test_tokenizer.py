from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import trio

from ksana.actors.tokenizer import decode_ids, encode_prompt, run_tokenizer
from ksana.errors import RequestError, ServiceError
from ksana.messages.base import Message
from ksana.messages.encoding import EncodePrompt, PromptEncoded
from ksana.messages.outputs import Aborted, Ended, Failed, PromptAccepted
from ksana.messages.requests import (
    Abort,
    AddRequest,
    Generate,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from ksana.runtime.mailbox import Mailbox
from ksana.tokenizers.core import MAX_CHARS_AT_ONCE, TokenizerCore
from ksana.tokenizers.prompts import PromptEncoder
from tests.tokenizers.exploding_tokenizers import EXPLODING
from tests.tokenizers.tiny_tokenizers import byte_level_tokenizer, tokenizer_of

TOKENIZER = byte_level_tokenizer()
LONG = TextPrompt(text="abc " * (MAX_CHARS_AT_ONCE // 4 + 1))


def encoder() -> PromptEncoder:
    return PromptEncoder(TOKENIZER, max_model_len=50_000, vocab_size=TOKENIZER.vocab_size)


def generate(request_id: int, prompt: TextPrompt) -> Generate:
    sampling = SamplingParams(seed=1, max_tokens=5)
    return Generate(request_id=request_id, prompt=prompt, sampling=sampling, arrival_time_s=0, deadline_s=9)


class Running:
    """A tokenizer actor, and what was said by it."""

    def __init__(self, threads: bool, its_encoder: PromptEncoder | None = None) -> None:
        self.mailbox: Mailbox[Message] = Mailbox("tokenizer", 100)
        self.scheduler: list[Message] = []
        self.producer: list[Message] = []
        self.encoder = its_encoder or encoder()
        self.core = TokenizerCore(self.encoder)
        self.threads = threads
        self.activated = trio.Event()

    async def run(self) -> None:
        await run_tokenizer(
            self.core,
            self.encoder,
            self.mailbox,
            scheduler=self.scheduler.append,
            producer=self.producer.append,
            tap=lambda *_: self.activated.set(),
            threads=self.threads,
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        with trio.fail_after(5):
            while not condition():
                self.activated = trio.Event()
                await self.activated.wait()

    async def until_heard(self, num_messages: int) -> None:
        await self.until(lambda: len(self.producer) >= num_messages)


async def test_long_and_short_prompts_arrive_with_and_without_threads() -> None:
    for threads in (True, False):
        actor = Running(threads)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(actor.run)
            actor.mailbox.put(generate(1, LONG))
            actor.mailbox.put(generate(2, TextPrompt(text="abc")))
            await actor.until_heard(2)
            actor.mailbox.close()
        added = {
            message.request_id: message for message in actor.scheduler if isinstance(message, AddRequest)
        }
        assert added[1].prompt_token_ids == tuple(TOKENIZER.encode(LONG.text))
        assert added[2].prompt_token_ids == tuple(TOKENIZER.encode("abc"))
        assert {message.request_id for message in actor.producer if isinstance(message, PromptAccepted)} == {
            1,
            2,
        }


class SlowEncoder(PromptEncoder):
    """Takes its time over long prompts, in whatever thread it is called."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER, max_model_len=50_000, vocab_size=TOKENIZER.vocab_size)
        self.started: list[int] = []

    def answer(self, message: EncodePrompt) -> PromptEncoded:
        if message.prompt == LONG:
            self.started.append(message.request_id)
            trio.from_thread.run(trio.sleep, 0.05)
        return super().answer(message)


async def test_short_prompts_do_not_wait_for_long_ones_and_an_abort_overtakes() -> None:
    actor = Running(threads=True, its_encoder=SlowEncoder())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(actor.run)
        actor.mailbox.put(generate(1, LONG))
        actor.mailbox.put(generate(2, TextPrompt(text="abc")))
        actor.mailbox.put(Abort(request_id=1))
        await actor.until_heard(2)
        assert [type(message) for message in actor.producer] == [PromptAccepted, Ended]
        ended = actor.producer[1]
        assert isinstance(ended, Ended)
        assert isinstance(ended.outcome, Aborted)
        # The encoder's answer, which nobody waits for.
        await actor.until(lambda: actor.core.counters.num_late_messages == 1)
        actor.mailbox.close()
    assert [message.request_id for message in actor.scheduler if isinstance(message, AddRequest)] == [2]


async def test_long_prompts_are_encoded_in_order_of_arrival() -> None:
    its_encoder = SlowEncoder()
    actor = Running(threads=True, its_encoder=its_encoder)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(actor.run)
        for request_id in range(1, 5):
            actor.mailbox.put(generate(request_id, LONG))
        await actor.until_heard(4)
        actor.mailbox.close()
    assert its_encoder.started == [1, 2, 3, 4]


async def test_closing_does_not_wait_for_a_prompt_under_way() -> None:
    actor = Running(threads=True, its_encoder=SlowEncoder())
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(actor.run)
            actor.mailbox.put(generate(1, LONG))
            await trio.sleep(0.01)
            actor.mailbox.close()
    assert actor.producer == []


async def test_prompts_outside_the_pipeline() -> None:
    for prompt in (LONG, TextPrompt(text="abc")):
        assert await encode_prompt(encoder(), prompt) == tuple(TOKENIZER.encode(prompt.text))


def slow_to_explode() -> PromptEncoder:
    """Encodes prompts with backtracking patterns, in another process; as long as the test says."""
    backend = EXPLODING[0].backend()
    tokenizer = tokenizer_of(backend)
    return PromptEncoder(tokenizer, max_model_len=50_000, vocab_size=tokenizer.vocab_size)


async def test_what_may_explode_is_not_encoded_on_the_event_loop() -> None:
    its_encoder = slow_to_explode()
    encode, threads = its_encoder.encode, []

    def noting_thread(prompt: Prompt) -> tuple[int, ...]:
        threads.append(threading.current_thread())
        return encode(prompt)

    its_encoder.encode = noting_thread  # type: ignore[method-assign]
    actor = Running(threads=True, its_encoder=its_encoder)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(actor.run)
        actor.mailbox.put(generate(1, TextPrompt(text=EXPLODING[0].poison)))
        actor.mailbox.put(generate(2, TextPrompt(text="b")))
        sampling = SamplingParams(seed=1, max_tokens=5)
        ids = Generate(
            request_id=3,
            prompt=TokensPrompt(token_ids=(5,)),
            sampling=sampling,
            arrival_time_s=0,
            deadline_s=9,
        )
        actor.mailbox.put(ids)
        with trio.fail_after(60):
            await actor.until_heard(3)
        actor.mailbox.close()
    its_encoder.tokenizer.close()
    assert [message.request_id for message in actor.producer] == [3, 1, 2]  # ids need not wait
    refused = actor.producer[1]
    assert isinstance(refused, Ended)
    assert isinstance(refused.outcome, Failed)
    assert (refused.outcome.status, refused.outcome.code) == (400, "prompt_not_tokenized")
    assert threads[0] is threading.main_thread()  # of the ids
    assert all(thread is not threading.main_thread() for thread in threads[1:])


async def test_a_prompt_whose_request_has_left_is_not_encoded_any_more() -> None:
    its_encoder = SlowEncoder()
    actor = Running(threads=True, its_encoder=its_encoder)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(actor.run)
        for request_id in (1, 2, 3):
            actor.mailbox.put(generate(request_id, LONG))
        actor.mailbox.put(Abort(request_id=2))
        await actor.until_heard(3)
        await actor.until(lambda: actor.core.counters.num_late_messages == 1)
        actor.mailbox.close()
    assert its_encoder.started == [1, 3]


async def test_prompts_outside_the_pipeline_that_explode() -> None:
    its_encoder = slow_to_explode()
    with pytest.raises(RequestError, match="could not be turned into tokens"):
        await encode_prompt(its_encoder, TextPrompt(text=EXPLODING[0].poison))
    assert await encode_prompt(its_encoder, TextPrompt(text="b"))
    its_encoder.tokenizer.close()


class Panic(BaseException):
    pass


@pytest.mark.parametrize("failure", [Panic("secret"), RuntimeError("secret")], ids=["panic", "error"])
async def test_failures_outside_the_pipeline_are_an_internal_error(
    failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> tuple[int, ...]:
        raise failure

    its_encoder = encoder()
    monkeypatch.setattr(its_encoder, "encode", fail)
    for prompt in (LONG, TextPrompt(text="abc")):
        with pytest.raises(ServiceError, match="internal error"):
            await encode_prompt(its_encoder, prompt)
    with monkeypatch.context() as patched:
        patched.setattr(TOKENIZER, "decode", fail)
        with pytest.raises(ServiceError, match="internal error"):
            decode_ids(TOKENIZER, (5,), False)
