"""Errors of requests that do not fit the context: they say how much was asked for and there is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ksana.errors import RequestError
from ksana.gateway.errors import CONTEXT_LENGTH_EXCEEDED


def too_much(num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> RequestError:
    """For more output than the context has, whatever the prompt."""
    return RequestError(
        f"The context has {max_model_len} tokens (max_model_len), but {num_prompt_tokens + max_tokens}"
        f" were asked for: {num_prompt_tokens} in the prompt and {max_tokens} of output (max_tokens).",
        param="max_tokens",
        code=CONTEXT_LENGTH_EXCEEDED,
    )


@contextmanager
def counting(max_tokens: int | None) -> Iterator[None]:
    """A prompt too long for the context is refused before anybody asks how much output was to follow it.
    This adds it."""
    try:
        yield
    except RequestError as error:
        if error.code != CONTEXT_LENGTH_EXCEEDED or max_tokens is None or "max_tokens" in error.message:
            raise
        text = f"{error.message} {max_tokens} tokens of output were asked for (max_tokens)."
        raise RequestError(
            text, status=error.status, param=error.param, code=error.code, type=error.type
        ) from None
