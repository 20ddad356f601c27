"""What comes back: from the scheduler to the tokenizer (ids), and from there to the producer (text)."""

from __future__ import annotations

from typing import Literal

from ksana.messages.base import Message, RequestId, StepId, Value


class Usage(Value):
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the cache when the request first ran (not after a preemption)."""


class Finished(Value, tag=True):
    """The request ran to its end."""

    reason: Literal["stop", "length"]
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it; None for the model's own end or for length."""


class Failed(Value, tag=True):
    """The request ended in an error; `status` as for HTTP."""

    status: int
    message: str
    error_type: str = "server_error"
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None


class Aborted(Value, tag=True):
    """The producer left, or the engine is shutting down."""

    reason: str


Outcome = Finished | Failed | Aborted


class RequestTokens(Value):
    """New output tokens of one choice, in order."""

    request_id: RequestId
    first_index: int
    """Output position (0-based) of token_ids[0]."""
    token_ids: tuple[int, ...]
    choice_index: int = 0


class RequestTiming(Value):
    """Engine clock times, seconds; None for what did not happen. Each is set once, at its first time, and
    survives preemption and a worker restart (but `last_token_s`, which is the last)."""

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None


class RequestEnded(Value):
    request_id: RequestId
    outcome: Outcome
    usage: Usage
    timing: RequestTiming | None = None
    """For latency histograms; None only where nobody measured."""


class StepOutputs(Message):
    """scheduler -> tokenizer. All that one activation of the scheduler has to say to producers.

    `tokens` come before `ended`: a request's last token and its ending may share a message.
    """

    step_id: StepId
    tokens: tuple[RequestTokens, ...] = ()
    ended: tuple[RequestEnded, ...] = ()


class PromptAccepted(Message):
    """tokenizer -> producer, first event of every request that is not refused."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    max_tokens: int


class TextDelta(Message):
    """tokenizer -> producer. Text that no later token can change, and the tokens that are accounted for.

    Deltas not yet taken are joined by the slot: a slow reader sees fewer and longer ones.
    Text may lag behind tokens (half a character, or what may become a stop string).
    """

    request_id: RequestId
    text: str
    token_ids: tuple[int, ...]
    choice_index: int = 0


class Ended(Message):
    """tokenizer -> producer, last event of every request; nothing follows."""

    request_id: RequestId
    outcome: Outcome
    usage: Usage


OutputEvent = PromptAccepted | TextDelta | Ended
