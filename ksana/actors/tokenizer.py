"""The tokenizer's shell.

Receives  `Generate` and `Abort` from producers; `StepOutputs` from the scheduler; `PromptEncoded` from its
          own encoder.
Sends     `AddRequest`, `Abort` and `StopStringFound` to the scheduler; `PromptAccepted`, `TextDelta` and
          `Ended` to producers.
Owns      the vocabulary; detokenizing and stop-matching state per request; prompts being encoded.
Never     ends a request that the scheduler knows; tokenizes on the event loop what is long or may explode;
          lets what goes wrong with the text of one request harm another.
If it fails  the generation ends: see `ksana.runtime.supervisor`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import trio

from ksana.errors import InvariantViolated, KsanaError, ServiceError
from ksana.messages.base import Message, RequestId
from ksana.messages.encoding import EncodePrompt, PromptEncoded
from ksana.messages.outputs import Failed
from ksana.messages.requests import Prompt
from ksana.runtime.actor import Address, Post, Tap, run_actor
from ksana.runtime.boundary import described, harms_only_its_request
from ksana.runtime.mailbox import Mailbox
from ksana.tokenizers.core import TokenizerCore
from ksana.tokenizers.prompts import PromptEncoder
from ksana.tokenizers.tokenizer import Tokenizer

log = logging.getLogger(__name__)


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
        self,
        encoder: PromptEncoder,
        reply: Post,
        nursery: trio.Nursery,
        is_awaited: Callable[[RequestId], bool] = lambda _: True,
        num_threads: int = 1,
    ) -> None:
        """`is_awaited`: whether a request still wants its prompt encoded. If not, that is not done any more,
        so that those who ask and leave do not make others wait."""
        self._encoder, self._reply, self._is_awaited = encoder, reply, is_awaited
        self._limiter = trio.CapacityLimiter(num_threads)
        self._put, self._queue = trio.open_memory_channel[EncodePrompt](math.inf)
        for _ in range(num_threads):
            nursery.start_soon(self._work)

    def post(self, message: Message) -> None:
        self._put.send_nowait(_order(message))

    async def _work(self) -> None:
        async for message in self._queue:
            if not self._is_awaited(message.request_id):
                gone = Failed(status=500, message="The request had left before its prompt was encoded.")
                self._reply(PromptEncoded(request_id=message.request_id, error=gone))
                continue
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
            encoding = ThreadedEncoding(encoder, mailbox.put, nursery, core.is_encoding)
        else:
            encoding = InlineEncoding(encoder, mailbox.put)
        post: dict[Address, Post] = {"scheduler": scheduler, "producer": producer, "tokenizer": encoding.post}
        await run_actor("tokenizer", core, mailbox, post, tap)
        nursery.cancel_scope.cancel()


_limiter: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("threads that encode")


def _threads_outside_pipeline() -> trio.CapacityLimiter:
    """Few: what waits long here must not take the threads that others need."""
    try:
        return _limiter.get()
    except LookupError:
        _limiter.set(trio.CapacityLimiter(2))
        return _limiter.get()


async def encode_prompt(encoder: PromptEncoder, prompt: Prompt) -> tuple[int, ...]:
    """The ids of a prompt for a caller that is not in the engine's pipeline (`/tokenize`).

    Whatever takes long is encoded in a thread. Raises RequestError, or ServiceError for our own failures.
    """
    try:
        if encoder.is_quick(prompt):
            return encoder.encode(prompt)
        return await trio.to_thread.run_sync(
            encoder.encode, prompt, abandon_on_cancel=True, limiter=_threads_outside_pipeline()
        )
    except KsanaError:
        raise
    except BaseException as error:
        if not harms_only_its_request(error):
            raise
        log.error("a prompt could not be tokenized: %s", described(error))
        raise ServiceError("The prompt could not be tokenized because of an internal error.") from None


def decode_ids(tokenizer: Tokenizer, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
    """The text of ids for such a caller (`/detokenize`). Raises ServiceError."""
    try:
        return tokenizer.decode(token_ids, skip_special_tokens)
    except BaseException as error:
        if not harms_only_its_request(error):
            raise
        log.error("ids could not be turned into text: %s", described(error))
        raise ServiceError("The tokens could not be turned into text because of an internal error.") from None
