"""What the tokenizer actor decides; `ksana.actors.tokenizer` is the shell around it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import msgspec

from ksana.errors import InvariantViolated, RequestError
from ksana.messages.base import Message, RequestId
from ksana.messages.encoding import EncodePrompt, PromptEncoded
from ksana.messages.outputs import (
    Aborted,
    Ended,
    Failed,
    Finished,
    Outcome,
    PromptAccepted,
    RequestEnded,
    RequestTokens,
    StepOutputs,
    TextDelta,
    Usage,
)
from ksana.messages.requests import Abort, AddRequest, Generate, SamplingParams, StopStringFound
from ksana.runtime.boundary import described, harms_only_its_request
from ksana.sampling.params import validate
from ksana.tokenizers.output_text import OutputText
from ksana.tokenizers.prompts import MAX_CHARS_AT_ONCE as MAX_CHARS_AT_ONCE
from ksana.tokenizers.prompts import PromptEncoder, refusal

log = logging.getLogger(__name__)

Said = tuple[Literal["scheduler", "producer", "tokenizer"], Message]


class TokenizerCounters(msgspec.Struct):
    """Totals since start."""

    num_late_messages: int = 0
    """For requests that are no more; normal after aborts and stop strings."""
    num_refused: int = 0
    num_text_failures: int = 0
    """Requests whose tokens could not be turned into text."""


class Running(msgspec.Struct):
    """A request that the scheduler knows: all that its text is made from."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: list[int]
    """Only those accounted for: nothing after a stop string."""
    aborted: bool = False
    """Nobody listens any more: its tokens are not turned into text."""
    failure: Failed | None = None
    """Its text could not be made: how it ends, whatever the scheduler says of it."""


class TokenizerState(msgspec.Struct):
    """All state; a snapshot is this in msgpack."""

    encoding: dict[RequestId, Generate]
    """Requests whose prompt is with the encoder."""
    running: dict[RequestId, Running]
    counters: TokenizerCounters


class TokenizerCore:
    """Prompts to ids on the way in, ids to text on the way out.

    Invariants: a request is in `encoding` or in `running` or neither; every `Generate` is answered by exactly
    one `Ended`; the joined text of a request's deltas is the text of its tokens, up to its stop string.
    Cost of a step with 32 running requests: see `tests/tokenizers/test_core.py`.
    """

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder
        self._tokenizer = encoder.tokenizer
        self._state = TokenizerState(encoding={}, running={}, counters=TokenizerCounters())
        self._texts: dict[RequestId, OutputText] = {}
        """One per running request; made from `running` again after `restore`."""
        self._said: list[Said] = []

    @property
    def counters(self) -> TokenizerCounters:
        return self._state.counters

    @property
    def num_requests(self) -> int:
        return len(self._state.encoding) + len(self._state.running)

    def is_encoding(self, request_id: RequestId) -> bool:
        """Whether the ids of its prompt are still waited for."""
        return request_id in self._state.encoding

    def next_timer_s(self) -> float | None:
        """Never: the tokenizer only acts on messages."""
        return None

    def handle(self, now_s: float, messages: Sequence[Message]) -> list[Said]:  # noqa: ARG002
        """One activation (see `ksana.runtime.actor.Core`)."""
        self._said = []
        for message in messages:
            if isinstance(message, StepOutputs):
                self._take_outputs(message)
            elif isinstance(message, Generate):
                self._generate(message)
            elif isinstance(message, PromptEncoded):
                self._encoded(message)
            elif isinstance(message, Abort):
                self._abort(message)
            else:
                raise InvariantViolated(f"the tokenizer does not understand {type(message).__name__}")
        return self._said

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode(self._state)

    def restore(self, snapshot: bytes) -> None:
        """Take over the state of a core with the same tokenizer and limits."""
        self._state = msgspec.msgpack.decode(snapshot, type=TokenizerState)
        self._texts = {}
        for request_id, running in self._state.running.items():
            text = OutputText(self._tokenizer, running.prompt_token_ids, running.sampling)
            for token_id in running.output_token_ids:
                text.push(token_id)
            self._texts[request_id] = text

    # The way in

    def _generate(self, message: Generate) -> None:
        request_id = message.request_id
        if request_id in self._state.encoding or request_id in self._state.running:
            raise InvariantViolated(f"request {request_id} was generated twice")
        try:
            validate(message.sampling, self._encoder.vocab_size, self._encoder.max_model_len)
            quick = self._encoder.is_quick(message.prompt)
        except BaseException as error:
            self._refuse(request_id, _ending(request_id, error))
            return
        order = EncodePrompt(request_id=request_id, prompt=message.prompt)
        if quick:
            self._admit(message, self._encoder.answer(order))
        else:
            self._state.encoding[request_id] = message
            self._said.append(("tokenizer", order))

    def _encoded(self, message: PromptEncoded) -> None:
        generate = self._state.encoding.pop(message.request_id, None)
        if generate is None:
            self.counters.num_late_messages += 1
        else:
            self._admit(generate, message)

    def _admit(self, message: Generate, encoded: PromptEncoded) -> None:
        request_id, token_ids = message.request_id, encoded.token_ids
        if encoded.error is not None:
            self._refuse(request_id, encoded.error)
            return
        try:
            sampling = self._encoder.resolve(message.sampling, len(token_ids))
            text = OutputText(self._tokenizer, token_ids, sampling)
        except BaseException as error:
            self._refuse(request_id, _ending(request_id, error), len(token_ids))
            return
        assert sampling.max_tokens is not None
        self._state.running[request_id] = Running(token_ids, sampling, [])
        self._texts[request_id] = text
        accepted = PromptAccepted(
            request_id=request_id, prompt_token_ids=token_ids, max_tokens=sampling.max_tokens
        )
        add = AddRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling=sampling,
            eos_token_ids=self._tokenizer.eos_ids,
            arrival_time_s=message.arrival_time_s,
            deadline_s=message.deadline_s,
            cache_salt=message.cache_salt,
        )
        self._said += (("producer", accepted), ("scheduler", add))

    def _refuse(self, request_id: RequestId, outcome: Outcome, num_prompt_tokens: int = 0) -> None:
        if isinstance(outcome, Failed):
            self.counters.num_refused += 1
        usage = Usage(num_prompt_tokens=num_prompt_tokens, num_output_tokens=0)
        self._said.append(("producer", Ended(request_id=request_id, outcome=outcome, usage=usage)))

    def _abort(self, message: Abort) -> None:
        request_id = message.request_id
        running = self._state.running.get(request_id)
        if running is not None:
            running.aborted = True
            self._said.append(("scheduler", message))
        elif self._state.encoding.pop(request_id, None) is not None:
            self._refuse(request_id, Aborted(reason="the client left"))
        else:
            self.counters.num_late_messages += 1

    # The way out

    def _take_outputs(self, message: StepOutputs) -> None:
        stopped: dict[RequestId, StopStringFound | Abort] = {}
        for tokens in message.tokens:
            self._take_tokens(tokens, stopped)
        for ended in message.ended:
            stopped.pop(ended.request_id, None)  # the scheduler does not know it any more
            self._end(ended)
        self._said += [("scheduler", found) for found in stopped.values()]

    def _take_tokens(self, tokens: RequestTokens, stopped: dict[RequestId, StopStringFound | Abort]) -> None:
        request_id = tokens.request_id
        running = self._state.running.get(request_id)
        if running is None or running.aborted:
            self.counters.num_late_messages += 1
            return
        output = self._texts[request_id]
        if output.stop_string is not None:
            self.counters.num_late_messages += 1
            return
        if tokens.first_index != output.num_tokens:
            raise InvariantViolated(
                f"request {request_id}: token {tokens.first_index} came when {output.num_tokens} was expected"
            )
        text, token_ids = "", tokens.token_ids
        for taken, token_id in enumerate(token_ids, 1):
            try:
                text += output.push(token_id)
            except BaseException as error:
                running.failure = self._text_failure(request_id, error)
                running.aborted = True
                token_ids = token_ids[: taken - 1]
                stopped[request_id] = Abort(request_id=request_id)
                break
            if output.stopped:
                token_ids = token_ids[:taken]
                stopped[request_id] = StopStringFound(
                    request_id=request_id,
                    token_index=output.num_tokens - 1,
                    choice_index=tokens.choice_index,
                    stop_string=output.stop_string,
                )
                break
        running.output_token_ids += token_ids
        if running.aborted and not token_ids:
            return
        delta = TextDelta(
            request_id=request_id, text=text, token_ids=token_ids, choice_index=tokens.choice_index
        )
        self._said.append(("producer", delta))

    def _end(self, ended: RequestEnded) -> None:
        request_id = ended.request_id
        running = self._state.running.pop(request_id, None)
        if running is None:
            self.counters.num_late_messages += 1
            return
        output = self._texts.pop(request_id)
        if not running.aborted:
            self._flush(request_id, running, output)
        outcome, usage = ended.outcome, ended.usage
        if running.failure is not None:
            outcome = running.failure
        elif output.stop_string is not None and isinstance(outcome, Finished):
            # The scheduler may have ended the request for another reason before it heard of the stop string.
            outcome = Finished(reason="stop", stop_reason=output.stop_string)
            num_output_tokens = min(usage.num_output_tokens, output.num_tokens)
            usage = msgspec.structs.replace(usage, num_output_tokens=num_output_tokens)
        self._said.append(("producer", Ended(request_id=request_id, outcome=outcome, usage=usage)))

    def _flush(self, request_id: RequestId, running: Running, output: OutputText) -> None:
        try:
            text = output.flush()
        except BaseException as error:
            running.failure = self._text_failure(request_id, error)
            return
        if text:
            self._said.append(("producer", TextDelta(request_id=request_id, text=text, token_ids=())))

    def _text_failure(self, request_id: RequestId, error: BaseException) -> Failed:
        """How a request ends whose tokens cannot be turned into text. Raises what harms more than it."""
        if not harms_only_its_request(error):
            raise error
        log.error("request %d: its tokens could not be turned into text: %s", request_id, described(error))
        self.counters.num_text_failures += 1
        return Failed(
            status=500, message="The answer could not be turned into text because of an internal error."
        )


def _ending(request_id: RequestId, error: BaseException) -> Failed:
    """How a request ends that failed before the scheduler knew it. Raises what harms more than it."""
    if isinstance(error, RequestError):
        return refusal(error)
    if not harms_only_its_request(error):
        raise error
    log.error("request %d: it could not be read: %s", request_id, described(error))
    return Failed(status=500, message="The request could not be read because of an internal error.")
