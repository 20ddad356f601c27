"""The `sampling_config` of POST /generate: its names and aliases, and what becomes of it."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ksana.errors import RequestError
from ksana.gateway.field_names import Names
from ksana.gateway.limits import MAX_TOKEN_ID
from ksana.gateway.request_body import check_neutral, convert
from ksana.gateway.sampling_fields import StopString, TokenId, draw_seed
from ksana.messages.requests import SamplingParams
from ksana.sampling.params import MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS

SAMPLING_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "length_penalty": (1,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "decoder_no_repeat_ngram_size": (0,),
    "logprobs": (0, False),
    "logprobs_num": (0,),
    "return_prompt_probs": (False,),
    "enable_structured_output": (False,),
    "json_schema": ("",),
}


class SamplingConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """KsanaLLM's names; `top_k`, `top_p`, `max_tokens` and `stop` are accepted beside them."""

    temperature: Annotated[float, Meta(ge=0)] | None = None
    topk: Annotated[int, Meta(ge=-1, le=MAX_TOKEN_ID)] | None = None
    topp: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    do_sample: bool | None = None
    max_new_tokens: Annotated[int, Meta(ge=-1, le=MAX_TOKEN_ID)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop_strings: Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None


_ALIASES = {
    "top_k": "topk",
    "top_p": "topp",
    "max_tokens": "max_new_tokens",
    "min_new_tokens": "min_tokens",
    "stop": "stop_strings",
    "random_seed": "seed",
}


_ENGINE_NAMES = {
    "topk": "top_k",
    "topp": "top_p",
    "max_new_tokens": "max_tokens",
    "stop_strings": "stop",
}
"""Our field, and what the engine calls it, if not the same."""

_PREFIX = "sampling_config."


def sampling_config(fields: dict[str, Any]) -> SamplingConfig:
    """`sampling_config` with its aliases resolved. RequestError names a field as it was sent."""
    sent, fields = fields, dict(fields)
    for alias, name in _ALIASES.items():
        if alias in fields:
            if name in fields:
                raise RequestError(
                    f"'sampling_config' has {name!r} under two names ({alias!r})",
                    param=_PREFIX + alias,
                )
            fields[name] = fields.pop(alias)
    if isinstance(fields.get("stop_strings"), str):
        fields["stop_strings"] = [fields["stop_strings"]]
    check_neutral(fields, SAMPLING_NEUTRAL, _PREFIX)
    try:
        return convert(fields, SamplingConfig, _PREFIX)
    except RequestError as error:
        raise _as_sent(error, sent) from None


def _as_sent(error: RequestError, sent: dict[str, Any]) -> RequestError:
    """`error` about a field of ours (or an element of it) under the name that the client knows."""
    for alias, name in _ALIASES.items():
        path = (error.param or "").removeprefix(_PREFIX)
        if alias in sent and path.partition("[")[0] == name:
            if alias == "stop" and isinstance(sent[alias], str):
                path = name
            param = _PREFIX + alias + path.removeprefix(name)
            message = error.message.replace(repr(error.param), repr(param), 1)
            return RequestError(message, status=error.status, param=param, code=error.code, type=error.type)
    return error


def sampling_names(sent: dict[str, Any]) -> Names:
    """What this `sampling_config` calls the fields of the engine."""
    names = {}
    for name in SamplingConfig.__struct_fields__:
        used = next((alias for alias, own in _ALIASES.items() if own == name and alias in sent), name)
        names[_ENGINE_NAMES.get(name, name)] = _PREFIX + used
    return names


def is_greedy(config: SamplingConfig) -> bool:
    """Whether every token is the likeliest one: asked for, or nothing else is."""
    if config.temperature == 0 or config.topk == 1 or config.do_sample is False:
        return True
    asks_for_sampling = (
        config.topk is not None
        or config.temperature is not None
        or config.do_sample is True
        or (config.topp is not None and 0 < config.topp < 1)
        or bool(config.min_p)
    )
    return not asks_for_sampling


def sampling_params(config: SamplingConfig) -> SamplingParams:
    """The engine's parameters, not checked yet. Raises RequestError for a 0 that would be none of them."""
    if config.topp == 0 and not is_greedy(config):
        raise RequestError("top_p must be above 0 when sampling", param="top_p", code="invalid_value")
    max_tokens = None if config.max_new_tokens in (None, -1) else config.max_new_tokens
    if max_tokens == 0:
        raise RequestError("max_tokens must be at least 1", param="max_tokens", code="invalid_value")
    return SamplingParams(
        seed=draw_seed() if config.seed is None else config.seed % (1 << 64),
        max_tokens=max_tokens,
        min_tokens=config.min_tokens or 0,
        temperature=1.0 if config.temperature is None else config.temperature,
        top_k=max(config.topk or 0, 0),
        top_p=config.topp or 1.0,
        min_p=config.min_p or 0.0,
        stop=tuple(config.stop_strings or ()),
        stop_token_ids=tuple(config.stop_token_ids or ()),
        ignore_eos=bool(config.ignore_eos),
    )


def greedy(sampling: SamplingParams) -> SamplingParams:
    """The same in the form that costs the sampler nothing."""
    return msgspec.structs.replace(sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
