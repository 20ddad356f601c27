"""POST /tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from quart import Response
from quart_trio import QuartTrio

from ksana.errors import RequestError
from ksana.gateway import sse
from ksana.gateway.chat import CHAT_NAMES, Message, chat_prompt
from ksana.gateway.context import Gateway
from ksana.gateway.errors import EMPTY_PROMPT
from ksana.gateway.field_names import naming
from ksana.gateway.limits import MAX_MESSAGES
from ksana.gateway.request_body import read_request
from ksana.gateway.sampling_fields import TokenId
from ksana.messages.requests import ChatPrompt, Prompt, TextPrompt

TOKENIZE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "return_token_strs": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "tools": ([],),
}


class TokenizeRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    tokens: list[TokenId]
    model: str | None = None


def tokenize_prompt(asked: TokenizeRequest) -> Prompt:
    """The prompt that a generating route would make of the same fields. Raises RequestError."""
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError("send either 'prompt' or 'messages'", param="prompt")
    if asked.messages is None:
        return TextPrompt(text=asked.prompt or "", add_special_tokens=asked.add_special_tokens is not False)
    if asked.add_special_tokens:
        raise RequestError(
            "'add_special_tokens' does not go with 'messages': the chat template brings its own",
            param="add_special_tokens",
        )
    return chat_prompt(asked.messages, asked.add_generation_prompt, asked.continue_final_message)


async def _tokens_of(gateway: Gateway, prompt: Prompt) -> tuple[int, ...]:
    """Like a generating route, but that no tokens are an answer too. Raises RequestError."""
    try:
        with naming(CHAT_NAMES if isinstance(prompt, ChatPrompt) else {}):
            return await gateway.client.tokenize(prompt)
    except RequestError as error:
        if error.code == EMPTY_PROMPT:
            return ()
        raise


def add_routes(app: QuartTrio, gateway: Gateway) -> None:
    @app.post("/tokenize")
    async def tokenize() -> Response:
        asked = await read_request(TokenizeRequest, TOKENIZE_NEUTRAL)
        gateway.check_model(asked.model)
        tokens = await _tokens_of(gateway, tokenize_prompt(asked))
        answer = {
            "count": len(tokens),
            "max_model_len": gateway.client.model.max_model_len,
            "tokens": tokens,
            "token_strs": None,
        }
        return Response(sse.encode_json(answer), content_type="application/json")

    @app.post("/detokenize")
    async def detokenize() -> Response:
        asked = await read_request(DetokenizeRequest, {})
        gateway.check_model(asked.model)
        with naming({"prompt": "tokens"}):
            text = await gateway.client.detokenize(tuple(asked.tokens))
        return Response(sse.encode_json({"prompt": text}), content_type="application/json")
