"""Chat templates: a conversation written out as the model was trained to read it.

The template is Jinja from the model's file. It runs in a sandbox (`ksana.tokenizers.template_sandbox`) with
the names that templates written for Hugging Face's transformers expect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2.exceptions import TemplateError

from ksana.errors import ModelLoadError, RequestError
from ksana.messages.requests import ChatMessage
from ksana.tokenizers.template_sandbox import TemplateSandbox

MAX_TEMPLATE_CHARS = 1_000_000
_MAX_DATE_FORMAT_CHARS = 100

_CONTINUE_MARK = "KSANA CONTINUES THIS MESSAGE "
"""Put behind the final message to find out where the template writes its end. The blank at its end shows
whether the template trims messages."""


class ChatTemplate:
    """One compiled template. Immutable; may be used from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str) -> None:
        """`special_tokens` maps "bos_token" and so on to their spelling; `origin` names the file in errors.

        Raises ModelLoadError for a template that cannot be compiled.
        """
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelLoadError(
                f"{origin}: the chat template has {len(source)} characters, more than {MAX_TEMPLATE_CHARS}"
            )
        self._special_tokens = dict(special_tokens)
        self._sandbox = TemplateSandbox()
        try:
            self._template = self._sandbox.from_string(source)
        except (TemplateError, RecursionError, SyntaxError) as error:
            raise ModelLoadError(f"{origin}: the chat template is not valid Jinja: {error}") from error

    def render(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        date: str | None = None,
    ) -> str:
        """The conversation as text, special tokens included.

        `add_generation_prompt` ends it with the header of an assistant's message; `continue_final_message`
        ends it inside the final message instead, so that the model goes on with it. `date` (ISO 8601) is what
        the template's `strftime_now` shows; without one the template does not have that function.
        Raises RequestError when the template refuses the conversation or does too much.
        """
        if not messages:
            raise RequestError("messages is empty", param="messages")
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other",
                param="continue_final_message",
            )
        plain = [_plain(message) for message in messages]
        if continue_final_message:
            plain[-1]["content"] += _CONTINUE_MARK
        text = self._run(plain, add_generation_prompt, date)
        return _cut_at_mark(text) if continue_final_message else text

    def _run(self, messages: list[dict[str, str]], add_generation_prompt: bool, date: str | None) -> str:
        names: dict[str, Any] = {
            **self._special_tokens,
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if date is not None:
            names["strftime_now"] = _date_formatter(date)
        self._sandbox.start()
        try:
            return self._template.render(names)
        except (
            Exception
        ) as error:  # a template can raise anything: its own errors, and TypeError and the like
            raise RequestError(
                f"the model's chat template does not accept these messages: {error or type(error).__name__}",
                param="messages",
                code="chat_template_error",
            ) from error


def _plain(message: ChatMessage) -> dict[str, str]:
    plain = {"role": message.role, "content": message.content}
    return plain if message.name is None else plain | {"name": message.name}


def _cut_at_mark(text: str) -> str:
    start = text.rfind(_CONTINUE_MARK.rstrip())
    if start < 0:
        raise RequestError(
            "the model's chat template does not write the final message out, so it cannot be continued",
            param="continue_final_message",
            code="chat_template_error",
        )
    before = text[:start]
    return before if text.startswith(_CONTINUE_MARK, start) else before.rstrip()


def _date_formatter(date: str) -> Callable[[str], str]:
    now = datetime.fromisoformat(date)

    def strftime_now(format: str) -> str:
        if len(format) > _MAX_DATE_FORMAT_CHARS:
            raise TemplateError(f"a date format has {len(format)} characters")
        return now.strftime(format)

    return strftime_now
