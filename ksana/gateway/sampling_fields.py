"""The sampling fields that the OpenAI routes share, and what becomes of them."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ksana.errors import RequestError
from ksana.gateway.limits import (
    MAX_CACHE_SALT,
    MAX_METADATA,
    MAX_TOKEN_ID,
    MAX_USER_LENGTH,
)
from ksana.messages.requests import SamplingParams
from ksana.sampling.params import MAX_STOP_STRING_LEN, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS

TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
NumTokens = Annotated[int, Meta(ge=1, le=MAX_TOKEN_ID)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_STRING_LEN)]
OneStopString = Annotated[str, Meta(max_length=MAX_STOP_STRING_LEN)]
"""An empty one by itself, as forms send that nobody filled in, is none."""
Label = Annotated[str, Meta(max_length=MAX_USER_LENGTH)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = False
    include_obfuscation: bool | None = False
    """OpenAI pads events with noise unless told not to; we never do, so both values are honest."""


class OpenAiFields(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What /v1/chat/completions and /v1/completions have in common. None stands for the default.

    Types and lengths are checked here, values by `ksana.sampling.params.validate`.
    """

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    max_tokens: NumTokens | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKEN_ID)] | None = None
    min_p: float | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: OneStopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT)] | None = None

    # Said about a request, not asked of it.
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    metadata: Annotated[dict[Label, Label], Meta(max_length=MAX_METADATA)] | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check_stream_options(self) -> None:
        """Raises RequestError for stream options without a stream."""
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "'stream_options' is only allowed with \"stream\": true", param="stream_options"
            )

    def sampling(self, max_tokens: int | None) -> SamplingParams:
        """The message's parameters; a seed is drawn where none was given, so that the run can be repeated."""
        stop = [self.stop] if isinstance(self.stop, str) and self.stop else self.stop or []
        return SamplingParams(
            seed=draw_seed() if self.seed is None else self.seed % (1 << 64),
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            stop=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
        )


def draw_seed() -> int:
    """A seed nobody can guess from another one."""
    return secrets.randbits(63)


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "priority": (0,),
    "service_tier": ("auto", "default", "flex", "priority", "scale"),
    "store": (False,),
    "prompt_cache_retention": ("in-memory", "in_memory", "24h"),
}
"""Fields of OpenAI and vLLM on both routes that are accepted only where they change nothing."""
