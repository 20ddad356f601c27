"""POST /v1/chat/completions."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from quart import Response
from quart_trio import QuartTrio

from ksana.errors import RequestError
from ksana.gateway.answer import Ask, answer
from ksana.gateway.context import Gateway
from ksana.gateway.field_names import Names
from ksana.gateway.limits import MAX_CONTENT_PARTS, MAX_MESSAGES
from ksana.gateway.openai_forms import ChatForm
from ksana.gateway.request_body import convert, read_request
from ksana.gateway.sampling_fields import NEUTRAL, Label, NumTokens, OpenAiFields
from ksana.messages.requests import ChatMessage, ChatPrompt

CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none", "medium"),
    "verbosity": ("medium",),
    "web_search_options": (),
    "echo": (False,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
}
"""Fields of chat that are accepted only where they change nothing."""

_MESSAGE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "refusal": (),
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "audio": (),
    "annotations": ([],),
    "reasoning_content": ("",),
}


CHAT_NAMES: Names = {"prompt": "messages"}
_NEW_CHAT_NAMES: Names = {**CHAT_NAMES, "max_tokens": "max_completion_tokens"}


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    text: str


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_CONTENT_PARTS)] | None = None
    name: Label | None = None

    refusal: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    audio: Any = None
    annotations: Any = None
    reasoning_content: Any = None


class ChatRequest(OpenAiFields, kw_only=True, frozen=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: NumTokens | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


def chat_prompt(
    messages: list[Message], add_generation_prompt: bool | None, continue_final_message: bool | None
) -> ChatPrompt:
    """The engine's form of a conversation. Raises RequestError for what a text model cannot read."""
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "'continue_final_message' goes on with the last message, 'add_generation_prompt' begins another; "
            "ask for one of them",
            param="continue_final_message",
        )
    return ChatPrompt(
        messages=tuple(_message(index, message) for index, message in enumerate(messages)),
        add_generation_prompt=not continue_final_message
        if add_generation_prompt is None
        else add_generation_prompt,
        continue_final_message=bool(continue_final_message),
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
    )


def _message(index: int, message: Message) -> ChatMessage:
    where = f"messages[{index}]"
    for name, allowed in _MESSAGE_NEUTRAL.items():
        value = getattr(message, name)
        if value is not None and value not in allowed:
            raise RequestError(
                f"'{where}.{name}' is not supported by this server yet; leave it out",
                param=f"{where}.{name}",
                code="unsupported_parameter",
            )
    if message.content is None:
        if message.role != "assistant":
            raise RequestError(
                f"'{where}.content' is required for the role {message.role!r}", param=f"{where}.content"
            )
        text = ""
    elif isinstance(message.content, str):
        text = message.content
    else:
        text = "\n".join(_part(f"{where}.content[{at}]", part) for at, part in enumerate(message.content))
    # OpenAI's newer word for what templates call the system's message.
    role = "system" if message.role == "developer" else message.role
    return ChatMessage(role=role, content=text, name=message.name)


def _part(where: str, part: dict[str, Any]) -> str:
    """The text of a content part. Its fields depend on its type, so that is looked at first."""
    kind = part.get("type")
    if isinstance(kind, str) and kind != "text":
        raise RequestError(
            f"unsupported content: '{where}' is of type {kind[:64]!r}, and this server only reads text",
            param=f"{where}.type",
            code="unsupported_content",
        )
    return convert(part, TextPart, where + ".").text


def add_routes(app: QuartTrio, gateway: Gateway) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions() -> Response:
        asked = await read_request(ChatRequest, CHAT_NEUTRAL)
        gateway.check_model(asked.model)
        asked.check_stream_options()
        prompt = chat_prompt(asked.messages, asked.add_generation_prompt, asked.continue_final_message)
        form = ChatForm(gateway.model_name, int(gateway.wall_clock()), asked.include_usage)
        ask = Ask(
            prompts=(prompt,),
            sampling=asked.sampling(_max_tokens(asked)),
            is_seeded=asked.seed is not None,
            stream=bool(asked.stream),
            cache_salt=asked.cache_salt or "",
            names=CHAT_NAMES if asked.max_completion_tokens is None else _NEW_CHAT_NAMES,
        )
        return await answer(gateway, ask, form)


def _max_tokens(asked: ChatRequest) -> int | None:
    """The limit under either name; none means up to the context."""
    old, new = asked.max_tokens, asked.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"'max_tokens' ({old}) and 'max_completion_tokens' ({new}) are two names of one limit",
            param="max_completion_tokens",
        )
    return old if new is None else new
