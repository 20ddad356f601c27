"""Prompts to ids: all forms of a prompt, and every limit on its size.

Limits are checked before the work they are to prevent: a text longer than max_model_len tokens could ever
be is refused without being tokenized.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from ksana.errors import RequestError
from ksana.messages.encoding import EncodePrompt, PromptEncoded
from ksana.messages.outputs import Failed
from ksana.messages.requests import ChatPrompt, Prompt, SamplingParams, TextPrompt, TokensPrompt
from ksana.runtime.boundary import described, harms_only_its_request
from ksana.tokenizers.guarded_encoding import NOT_TOKENIZED
from ksana.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_CHARS_AT_ONCE = 4096
"""Longer texts are given to the encoder, so that nobody waits for them: this many characters take 0.5 ms
when they are words, 15 ms when they are digits or emoji."""
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
EMPTY_PROMPT = "empty_prompt"


class PromptEncoder:
    """Prompts to ids for one model. Immutable; may be used from several threads."""

    def __init__(self, tokenizer: Tokenizer, *, max_model_len: int, vocab_size: int) -> None:
        """`vocab_size` is the model's: the number of ids that it has embeddings for."""
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.max_prompt_chars = max_model_len * tokenizer.longest_token_chars

    def check_size(self, prompt: Prompt) -> int:
        """Number of characters of a prompt's text (0 for ids). Cheap.

        Raises RequestError when it cannot fit the context however it is tokenized.
        """
        if isinstance(prompt, TokensPrompt):
            self._check_length(len(prompt.token_ids), prompt)
            return 0
        num_chars = _num_chars(prompt)
        self._check_chars(num_chars, prompt)
        return num_chars

    def is_quick(self, prompt: Prompt) -> bool:
        """Whether a prompt may be encoded while others wait. Raises what `check_size` does."""
        num_chars = self.check_size(prompt)
        if isinstance(prompt, TokensPrompt):
            return True
        return num_chars <= MAX_CHARS_AT_ONCE and not self.tokenizer.encoding.is_elsewhere(num_chars)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The ids of a prompt: at least one, each in the vocabulary, fewer than max_model_len of them.

        Time is linear in the text, about 0.15 µs per character. Raises RequestError.
        """
        self.check_size(prompt)
        if isinstance(prompt, TokensPrompt):
            self.check_ids(prompt.token_ids)
            token_ids = tuple(prompt.token_ids)
        elif isinstance(prompt, TextPrompt):
            token_ids = tuple(self.tokenizer.encode(prompt.text, prompt.add_special_tokens))
        else:
            text = self.tokenizer.render_chat(
                prompt.messages, prompt.add_generation_prompt, prompt.continue_final_message, prompt.date
            )
            self._check_chars(len(text), prompt)
            token_ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        if not token_ids:
            raise RequestError(
                "The prompt is empty: it has no tokens.", param=_param(prompt), code=EMPTY_PROMPT
            )
        self._check_length(len(token_ids), prompt)
        if (
            self.tokenizer.vocab_size > self.vocab_size
        ):  # tokens were added for which the model has no embedding
            self.check_ids(token_ids, _param(prompt))
        return token_ids

    def answer(self, message: EncodePrompt) -> PromptEncoded:
        """`encode` as a message. Never raises: what goes wrong harms this request only."""
        try:
            token_ids = self.encode(message.prompt)
        except RequestError as error:
            if error.code == NOT_TOKENIZED:
                logger.warning("request %d: %s", message.request_id, error.message)
            return PromptEncoded(request_id=message.request_id, error=refusal(error))
        except BaseException as error:
            if not harms_only_its_request(error):
                raise
            logger.error(
                "request %d: the prompt could not be tokenized: %s", message.request_id, described(error)
            )
            failed = Failed(
                status=500, message="The prompt could not be tokenized because of an internal error."
            )
            return PromptEncoded(request_id=message.request_id, error=failed)
        return PromptEncoded(request_id=message.request_id, token_ids=token_ids)

    def check_ids(self, token_ids: Sequence[int], param: str = "prompt") -> None:
        """Raise RequestError, about the field `param`, unless all ids are in the model's vocabulary."""
        for index, token_id in enumerate(token_ids):
            if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"Token {index} is {str(token_id)[:40]}, outside the vocabulary: ids go from 0 to"
                    f" {self.vocab_size - 1}.",
                    param=param,
                    code="invalid_token_id",
                )

    def resolve(self, sampling: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """`sampling` with `max_tokens` as a number, so that prompt and output fit the context.

        Raises RequestError when they do not.
        """
        room = self.max_model_len - num_prompt_tokens
        if sampling.max_tokens is None:
            if sampling.min_tokens > room:
                raise RequestError(
                    f"min_tokens is {sampling.min_tokens}, but after a prompt of {num_prompt_tokens} tokens"
                    f" the context of {self.max_model_len} has room for {room}.",
                    param="min_tokens",
                    code=CONTEXT_LENGTH_EXCEEDED,
                )
            return msgspec.structs.replace(sampling, max_tokens=room)
        if sampling.max_tokens > room:
            raise RequestError(
                f"The context has {self.max_model_len} tokens (max_model_len), but"
                f" {num_prompt_tokens + sampling.max_tokens} were asked for:"
                f" {num_prompt_tokens} in the prompt and {sampling.max_tokens} of output (max_tokens)."
                " Shorten the prompt or lower max_tokens.",
                param="max_tokens",
                code=CONTEXT_LENGTH_EXCEEDED,
            )
        return sampling

    def _check_chars(self, num_chars: int, prompt: Prompt) -> None:
        if num_chars > self.max_prompt_chars:
            raise RequestError(
                f"The prompt has {num_chars} characters, which cannot fit the context of {self.max_model_len}"
                f" tokens (no token has more than {self.tokenizer.longest_token_chars} characters).",
                param=_param(prompt),
                code=CONTEXT_LENGTH_EXCEEDED,
            )

    def _check_length(self, num_tokens: int, prompt: Prompt) -> None:
        if num_tokens >= self.max_model_len:
            raise RequestError(
                f"The prompt has {num_tokens} tokens and the context {self.max_model_len} (max_model_len):"
                " there is no room for any output. Shorten the prompt.",
                param=_param(prompt),
                code=CONTEXT_LENGTH_EXCEEDED,
            )


def refusal(error: RequestError) -> Failed:
    """A RequestError as an outcome."""
    return Failed(
        status=error.status,
        message=error.message,
        error_type=error.type,
        param=error.param,
        code=error.code,
    )


def _num_chars(prompt: TextPrompt | ChatPrompt) -> int:
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    return sum(
        len(message.content) + len(message.role) + len(message.name or "") for message in prompt.messages
    )


def _param(prompt: Prompt) -> str:
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"
