"""What a script gives to `LLM.generate`, as messages: checked for its types before anybody else sees it.

A value of a type that no message has (a numpy array, None, a list where there should be a text) would come
to light only in an actor or in a journal, where it would be nobody's fault.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from uuid import UUID

import msgspec

from ksana.errors import RequestError
from ksana.messages.requests import ChatPrompt, Prompt, SamplingParams, TextPrompt, TokensPrompt
from ksana.shown import shown

AnyPrompt = str | Sequence[int] | Prompt
"""Text, token ids, or one of the prompt structs (a conversation is a `ChatPrompt`)."""

_NO_TEXTS = (bytes, bytearray, memoryview, datetime, date, time, timedelta, UUID, Decimal)
"""Types that msgspec would write as texts."""
_PROMPTS = "a text, a list of token ids, a prompt, or a list of these"


def as_prompts(prompts: AnyPrompt | Iterable[AnyPrompt]) -> list[Prompt]:
    """One prompt or several as a list. Raises RequestError that names the first that is none."""
    if isinstance(prompts, str | TextPrompt | TokensPrompt | ChatPrompt):
        return [_as_prompt(prompts, "the prompt")]
    items = _as_list(prompts, "prompts")
    if items and all(map(_is_id, items)):
        return [_as_prompt(items, "the prompt")]
    return [_as_prompt(item, f"prompt {index}") for index, item in enumerate(items)]


def as_sampling(
    sampling: SamplingParams | Iterable[SamplingParams], num_prompts: int
) -> list[SamplingParams]:
    """One for each prompt. Raises RequestError for what is none, ValueError for another number of them."""
    if isinstance(sampling, SamplingParams):
        return [sampling] * num_prompts
    params = _as_list(sampling, "sampling", "sampling", "SamplingParams, or a list of them")
    for index, item in enumerate(params):
        if not isinstance(item, SamplingParams):
            raise RequestError(f"sampling {index} is {shown(item)}, no SamplingParams", param="sampling")
    if len(params) != num_prompts:
        raise ValueError(f"{num_prompts} prompts, but {len(params)} sampling parameters")
    return params  # type: ignore[return-value]


def _as_prompt(prompt: object, name: str) -> Prompt:
    if isinstance(prompt, str):
        return TextPrompt(text=prompt)
    if isinstance(prompt, TokensPrompt):
        return TokensPrompt(token_ids=_as_ids(prompt.token_ids, name))
    if isinstance(prompt, TextPrompt | ChatPrompt):
        try:
            return msgspec.convert(msgspec.to_builtins(prompt, builtin_types=_NO_TEXTS), type(prompt))
        except (msgspec.ValidationError, TypeError, ValueError) as error:
            raise RequestError(f"{name} is no {type(prompt).__name__}: {error}", param="prompt") from None
    return TokensPrompt(token_ids=_as_ids(prompt, name))


def _as_ids(value: object, name: str) -> tuple[int, ...]:
    """Whether they are in the vocabulary is for the tokenizer to say."""
    ids = _as_list(value, name)
    for index, item in enumerate(ids):
        if not _is_id(item):
            raise RequestError(
                f"{name} holds {shown(item)} at place {index}, no token id (a whole number)", param="prompt"
            )
    return tuple(map(operator.index, ids))  # type: ignore[arg-type]


def _is_id(value: object) -> bool:
    """Also for numpy's and torch's numbers. Their truth values are no ids, either."""
    if type(value) is int:
        return True
    if isinstance(value, bool | str | bytes) or "bool" in str(getattr(value, "dtype", "")):
        return False
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _as_list(value: object, name: str, param: str = "prompt", expected: str = _PROMPTS) -> list[object]:
    wrong = isinstance(value, str | bytes | bytearray | memoryview | Mapping | AbstractSet | msgspec.Struct)
    if not wrong:
        try:
            return list(value)  # type: ignore[call-overload, no-any-return]
        except TypeError:  # nothing that can be gone through
            pass
    raise RequestError(f"{name}: {shown(value)} will not do; it must be {expected}", param=param)
