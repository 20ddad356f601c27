"""What producers ask for: from a producer to the tokenizer, and from the tokenizer to the scheduler."""

from __future__ import annotations

from ksana.messages.base import Message, RequestId, Value


class SamplingParams(Value):
    """How the next token is chosen and when to stop. Checked by `ksana.sampling.params.validate`."""

    seed: int
    """0 <= seed < 2**64. The producer draws one where the user gave none, so that a run can be repeated."""
    max_tokens: int | None = None
    """Output tokens at most; None means up to the context (the tokenizer puts the number in)."""
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request, besides the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


class ChatMessage(Value):
    role: str
    content: str
    name: str | None = None


class TextPrompt(Value, tag=True):
    text: str
    add_special_tokens: bool = True


class TokensPrompt(Value, tag=True):
    token_ids: tuple[int, ...]


class ChatPrompt(Value, tag=True):
    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    date: str | None = None
    """Date and time (ISO 8601) that the template's `strftime_now` shows. It is the producer's to say, so that
    a replay gives the same prompt; with None the template does not have that function."""


Prompt = TextPrompt | TokensPrompt | ChatPrompt


class Generate(Message):
    """producer -> tokenizer. The producer has opened the slot `request_id` before."""

    request_id: RequestId
    prompt: Prompt
    sampling: SamplingParams
    arrival_time_s: float
    deadline_s: float
    """Engine clock time at which the request fails with a 504."""
    cache_salt: str = ""
    """Requests with different salts never share cached KV."""
    external_id: str = ""
    """What the user calls it (`X-Request-Id`); only for logs."""


class Abort(Message):
    """producer -> tokenizer -> scheduler. Whoever waited for the request is gone."""

    request_id: RequestId


class AddRequest(Message):
    """tokenizer -> scheduler. The prompt as ids, every limit resolved; it fits the context."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    """`max_tokens` is a number here, and prompt + max_tokens <= max_model_len."""
    eos_token_ids: tuple[int, ...]
    arrival_time_s: float
    deadline_s: float
    cache_salt: str = ""


class StopStringFound(Message):
    """tokenizer -> scheduler. Output token `token_index` (0-based) of the choice completed a stop string.

    Tokens after it are neither shown nor counted.
    """

    request_id: RequestId
    token_index: int
    choice_index: int = 0
    stop_string: str | None = None
    """Which one; becomes the outcome's `stop_reason`."""


class Drain(Message):
    """engine -> scheduler. Time is up: every request left fails now with a 503, and so does any later one."""

    reason: str = "the server is shutting down"
