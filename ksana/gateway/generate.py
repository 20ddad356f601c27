"""POST /generate: KsanaLLM's native form.

Records are cumulative and each is ended by a NUL byte. With nothing said about sampling it is greedy, as
there. `topk` is 1 by default, and 0 (off) where the request asks for sampling by another field: a
`temperature` above 0, a `topp` between 0 and 1, a `min_p` above 0, or `do_sample` true. `temperature` 0,
`topk` 1 and `do_sample` false each mean greedy, whatever the others say.
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
from ksana.gateway.field_names import naming
from ksana.gateway.generate_sampling import (
    greedy,
    is_greedy,
    sampling_config,
    sampling_names,
    sampling_params,
)
from ksana.gateway.limits import MAX_CACHE_SALT
from ksana.gateway.request_body import read_request
from ksana.gateway.sampling_fields import TokenId
from ksana.messages.outputs import Finished, PromptAccepted, TextDelta, Usage
from ksana.messages.requests import Prompt, TextPrompt, TokensPrompt
from ksana.sampling.params import validate

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


class GenerateRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    prompt: str | None = None
    input_tokens: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    sampling_config: dict[str, Any] | None = None
    stream: bool | None = True
    model: str | None = None
    model_name: str | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT)] | None = None


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
        config = sampling_config(asked.sampling_config or {})
        prompt_name = "prompt" if asked.input_tokens is None else "input_tokens"
        names = {**sampling_names(asked.sampling_config or {}), "prompt": prompt_name}
        with naming(names):
            sampling = sampling_params(config)
            if is_greedy(config):
                # What will not be used is checked all the same.
                model = gateway.client.model
                unlimited = msgspec.structs.replace(sampling, max_tokens=None)
                validate(unlimited, model.vocab_size, model.max_model_len)
                sampling = greedy(sampling)
        ask = Ask(
            prompts=(prompt_of(asked),),
            sampling=sampling,
            is_seeded=config.seed is not None,
            stream=asked.stream is not False,
            cache_salt=asked.cache_salt or "",
            names=names,
        )
        return await answer(gateway, ask, GenerateForm())
