"""POST /v1/completions.

A `seed` is every prompt's: the same request has the same answer, and equal prompts in it have equal texts.
Without one, each prompt gets its own.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta
from quart import Response
from quart_trio import QuartTrio

from ksana.errors import RequestError
from ksana.gateway.answer import Ask, answer
from ksana.gateway.context import Gateway
from ksana.gateway.limits import MAX_PROMPTS
from ksana.gateway.openai_forms import CompletionForm
from ksana.gateway.request_body import read_request
from ksana.gateway.sampling_fields import NEUTRAL, OpenAiFields, TokenId
from ksana.messages.requests import Prompt, TextPrompt, TokensPrompt

DEFAULT_MAX_TOKENS = 16

COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "logprobs": (False,),
    "echo": (False,),
    "suffix": ("",),
}
"""Fields of completions that are accepted only where they change nothing."""


class CompletionRequest(OpenAiFields, kw_only=True, frozen=True):
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    add_special_tokens: bool | None = None


def prompts_of(prompt: str | list[str | int | list[int]], add_special_tokens: bool) -> tuple[Prompt, ...]:
    """One prompt per choice, from a text, texts, token ids, or lists of token ids. Raises RequestError."""
    if isinstance(prompt, str):
        return (TextPrompt(text=prompt, add_special_tokens=add_special_tokens),)
    ids = [one for one in prompt if isinstance(one, int)]
    if ids:
        if len(ids) != len(prompt):
            raise RequestError("'prompt' mixes token ids with something else", param="prompt")
        return (TokensPrompt(token_ids=tuple(ids)),)
    if len({type(one) for one in prompt}) > 1:
        raise RequestError("'prompt' mixes texts with lists of token ids", param="prompt")
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(f"{len(prompt)} prompts in one request; at most {MAX_PROMPTS}", param="prompt")
    prompts: list[Prompt] = []
    for one in prompt:
        if isinstance(one, str):
            prompts.append(TextPrompt(text=one, add_special_tokens=add_special_tokens))
        elif isinstance(one, list):
            if not one:
                raise RequestError("'prompt' holds an empty list of token ids", param="prompt")
            prompts.append(TokensPrompt(token_ids=tuple(one)))
    return tuple(prompts)


def add_routes(app: QuartTrio, gateway: Gateway) -> None:
    @app.post("/v1/completions")
    async def completions() -> Response:
        asked = await read_request(CompletionRequest, COMPLETION_NEUTRAL)
        gateway.check_model(asked.model)
        asked.check_stream_options()
        max_tokens = DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
        form = CompletionForm(gateway.model_name, int(gateway.wall_clock()), asked.include_usage)
        ask = Ask(
            prompts=prompts_of(asked.prompt, asked.add_special_tokens is not False),
            sampling=asked.sampling(max_tokens),
            is_seeded=asked.seed is not None,
            stream=bool(asked.stream),
            cache_salt=asked.cache_salt or "",
        )
        return await answer(gateway, ask, form)
