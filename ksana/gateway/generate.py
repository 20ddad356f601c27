"""POST /generate: KsanaLLM's native form.

Records are cumulative and each is ended by a NUL byte. With nothing said about sampling it is greedy, as
there (`topk` is 1 by default).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from quart import Response
from quart_trio import QuartTrio

from ksana.errors import RequestError
from ksana.gateway import sse
from ksana.gateway.answer import Ask, Result, answer
from ksana.gateway.context import Gateway
from ksana.gateway.errors import ApiError, error_body
from ksana.gateway.limits import MAX_CACHE_SALT, MAX_TOKEN_ID
from ksana.gateway.request_body import check_neutral, convert, read_request
from ksana.gateway.sampling_fields import StopString, TokenId, draw_seed
from ksana.messages.outputs import Finished, PromptAccepted, TextDelta, Usage
from ksana.messages.requests import Prompt, SamplingParams, TextPrompt, TokensPrompt
from ksana.sampling.params import MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS

END_OF_RECORD = b"\0"

GENERATE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "messages": ([],),
    "use_chat_template": (False,),
    "additional_params": ({},),
    "input_refit_embedding": ({},),
    "pos": ([],),
    "embeddings": ([],),
    "structured_output_regex": ("",),
    "model_type": ("empty", ""),
}

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


class GenerateRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    prompt: str | None = None
    input_tokens: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    sampling_config: dict[str, Any] | None = None
    stream: bool | None = True
    model: str | None = None
    model_name: str | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT)] | None = None


def sampling_config(fields: dict[str, Any]) -> SamplingConfig:
    """`sampling_config` with its aliases resolved. Raises RequestError that names the field."""
    fields = dict(fields)
    for alias, name in _ALIASES.items():
        if alias in fields:
            if name in fields:
                raise RequestError(
                    f"'sampling_config' has {name!r} under two names ({alias!r})",
                    param=f"sampling_config.{alias}",
                )
            fields[name] = fields.pop(alias)
    if isinstance(fields.get("stop_strings"), str):
        fields["stop_strings"] = [fields["stop_strings"]]
    check_neutral(fields, SAMPLING_NEUTRAL, "sampling_config.")
    return convert(fields, SamplingConfig, "sampling_config.")


def sampling_params(config: SamplingConfig) -> SamplingParams:
    top_k = 1 if config.topk is None else max(config.topk, 0)
    greedy = top_k == 1 or config.do_sample is False
    top_p = 1.0 if greedy or config.topp is None else config.topp
    if top_p == 0:
        raise RequestError(
            "'sampling_config.topp' must be above 0 when sampling", param="sampling_config.topp"
        )
    temperature = 1.0 if config.temperature is None else config.temperature
    max_tokens = None if config.max_new_tokens in (None, -1) else config.max_new_tokens
    if max_tokens == 0:
        raise RequestError(
            "'sampling_config.max_new_tokens' must be at least 1", param="sampling_config.max_new_tokens"
        )
    return SamplingParams(
        seed=draw_seed() if config.seed is None else config.seed % (1 << 64),
        max_tokens=max_tokens,
        min_tokens=config.min_tokens or 0,
        temperature=0.0 if greedy else temperature,
        top_k=0 if greedy else top_k,
        top_p=top_p,
        min_p=0.0 if greedy else config.min_p or 0.0,
        stop=tuple(config.stop_strings or ()),
        stop_token_ids=tuple(config.stop_token_ids or ()),
        ignore_eos=bool(config.ignore_eos),
    )


class GenerateForm:
    """Records {texts, output_token_ids, logprobs, input_token_ids}, each with all there is so far.

    Cost: a stream of n records is O(n^2) bytes, as the form demands; waiting output shares a record.
    """

    content_type = "application/octet-stream"

    def __init__(self) -> None:
        self._input_ids: tuple[int, ...] = ()
        self._texts: list[str] = []
        self._ids: list[int] = []

    def _record(self, text: str, ids: Sequence[int], input_ids: Sequence[int]) -> dict[str, Any]:
        return {"texts": [text], "output_token_ids": [ids], "logprobs": [], "input_token_ids": input_ids}

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        (result,) = results
        return self._record(result.text, result.token_ids, result.prompt_token_ids)

    def accepted(self, _index: int, event: PromptAccepted) -> bytes:
        self._input_ids = event.prompt_token_ids
        return b""

    def text(self, _index: int, event: TextDelta) -> bytes:
        self._texts.append(event.text)
        self._ids += event.token_ids
        return self._so_far()

    def finished(self, _index: int, _finished: Finished) -> bytes:
        return b"" if self._ids or self._texts else self._so_far()

    def closing(self, _usages: Sequence[Usage]) -> bytes:
        return b""

    def failed(self, error: ApiError) -> bytes:
        return sse.encode_json(error_body(error)) + END_OF_RECORD

    def _so_far(self) -> bytes:
        return sse.encode_json(self._record("".join(self._texts), self._ids, self._input_ids)) + END_OF_RECORD


def prompt_of(asked: GenerateRequest) -> Prompt:
    if (asked.prompt is None) == (asked.input_tokens is None):
        raise RequestError("send either 'prompt' or 'input_tokens'", param="prompt")
    if asked.input_tokens is not None:
        return TokensPrompt(token_ids=tuple(asked.input_tokens))
    return TextPrompt(text=asked.prompt or "")


def add_routes(app: QuartTrio, gateway: Gateway) -> None:
    @app.post("/generate")
    async def generate() -> Response:
        asked = await read_request(GenerateRequest, GENERATE_NEUTRAL)
        gateway.check_model(asked.model or asked.model_name or None)
        ask = Ask(
            prompts=(prompt_of(asked),),
            sampling=sampling_params(sampling_config(asked.sampling_config or {})),
            stream=asked.stream is not False,
            cache_salt=asked.cache_salt or "",
        )
        return await answer(gateway, ask, GenerateForm())
