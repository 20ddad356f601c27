"""The tokenizer's shell.

Receives  `Generate` and `Abort` from producers; `StepOutputs` from the scheduler; `PromptEncoded` from its
          own encoder.
Sends     `AddRequest`, `Abort` and `StopStringFound` to the scheduler; `PromptAccepted`, `TextDelta` and
          `Ended` to producers.
Owns      the vocabulary; detokenizing and stop-matching state per request; prompts being encoded.
Never     ends a request that the scheduler knows; tokenizes a long text on the event loop.
If it fails  the generation ends: see `ksana.runtime.supervisor`.
"""

from __future__ import annotations

import math

import trio

from ksana.errors import InvariantViolated
from ksana.messages.base import Message
from ksana.messages.encoding import EncodePrompt
from ksana.messages.requests import Prompt
from ksana.runtime.actor import Address, Post, Tap, run_actor
from ksana.runtime.mailbox import Mailbox
from ksana.tokenizers.core import MAX_CHARS_AT_ONCE, TokenizerCore
from ksana.tokenizers.prompts import PromptEncoder


class InlineEncoding:
    """Encodes at once, without threads: for simulations and tests."""

    def __init__(self, encoder: PromptEncoder, reply: Post) -> None:
        self._encoder, self._reply = encoder, reply

    def post(self, message: Message) -> None:
        self._reply(self._encoder.answer(_order(message)))


class ThreadedEncoding:
    """Encodes in threads of its own, at most `num_threads` at a time; the others wait in order of arrival.

    What is under way when the nursery is cancelled is abandoned: its answer is never given. The queue is
    bounded by the number of slots, as every order is of a request that has one.
    """

    def __init__(
        self, encoder: PromptEncoder, reply: Post, nursery: trio.Nursery, num_threads: int = 1
    ) -> None:
        self._encoder, self._reply = encoder, reply
        self._limiter = trio.CapacityLimiter(num_threads)
        self._put, self._queue = trio.open_memory_channel[EncodePrompt](math.inf)
        for _ in range(num_threads):
            nursery.start_soon(self._work)

    def post(self, message: Message) -> None:
        self._put.send_nowait(_order(message))

    async def _work(self) -> None:
        async for message in self._queue:
            answer = await trio.to_thread.run_sync(
                self._encoder.answer, message, limiter=self._limiter, abandon_on_cancel=True
            )
            self._reply(answer)


def _order(message: Message) -> EncodePrompt:
    if not isinstance(message, EncodePrompt):
        raise InvariantViolated(f"an encoder does not understand {type(message).__name__}")
    return message


async def run_tokenizer(
    core: TokenizerCore,
    encoder: PromptEncoder,
    mailbox: Mailbox[Message],
    *,
    scheduler: Post,
    producer: Post,
    tap: Tap | None = None,
    threads: bool = True,
) -> None:
    """Run the tokenizer until its mailbox is closed. `encoder` is the one `core` was made with.

    The mailbox gets one message more per request than producers and scheduler send: `PromptEncoded`.
    """
    async with trio.open_nursery() as nursery:
        encoding: InlineEncoding | ThreadedEncoding
        if threads:
            encoding = ThreadedEncoding(encoder, mailbox.put, nursery)
        else:
            encoding = InlineEncoding(encoder, mailbox.put)
        post: dict[Address, Post] = {"scheduler": scheduler, "producer": producer, "tokenizer": encoding.post}
        await run_actor("tokenizer", core, mailbox, post, tap)
        nursery.cancel_scope.cancel()


async def encode_prompt(encoder: PromptEncoder, prompt: Prompt) -> tuple[int, ...]:
    """The ids of a prompt for a caller that is not in the engine's pipeline (`/tokenize`).

    Long texts are encoded in a thread. Raises RequestError.
    """
    if encoder.check_size(prompt) > MAX_CHARS_AT_ONCE:
        return await trio.to_thread.run_sync(encoder.encode, prompt, abandon_on_cancel=True)
    return encoder.encode(prompt)
