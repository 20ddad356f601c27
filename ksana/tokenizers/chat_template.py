"""Chat templates: a conversation written out as the model was trained to read it.

The template is Jinja from the model's file. It runs in a sandbox (`ksana.tokenizers.template_sandbox`) with
the names that templates written for Hugging Face's transformers expect, and writes what it writes there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import count
from typing import Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from ksana.errors import ModelLoadError, RequestError
from ksana.messages.requests import ChatMessage
from ksana.tokenizers.template_access import TemplateFunction
from ksana.tokenizers.template_limits import TemplateTooLarge
from ksana.tokenizers.template_sandbox import TemplateSandbox

_MAX_DATE_FORMAT_CHARS = 100
_MAX_ERROR_CHARS = 500


class ChatTemplate:
    """One compiled template. Immutable; may be used from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str) -> None:
        """`special_tokens` maps "bos_token" and so on to their spelling; `origin` names the file in errors.

        Raises ModelLoadError for a template that cannot be compiled, or not with reasonable effort.
        """
        self._special_tokens = dict(special_tokens)
        self._sandbox = TemplateSandbox()
        try:
            self._template = self._sandbox.from_string(source)
        except TemplateTooLarge as error:
            reason = f"too large: {_message(error)}"
        except Exception as error:  # of Jinja's parser and of Python's compiler: anything
            reason = f"not valid Jinja: {_message(error)}"
        else:
            return
        raise ModelLoadError(f"{origin}: the chat template is {reason}")

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
        if not continue_final_message:
            return self._run(plain, add_generation_prompt, date)
        mark = _mark_that_is_not_in(plain)
        final = plain[-1]["content"]
        plain[-1]["content"] += mark
        return _cut_at_mark(self._run(plain, add_generation_prompt, date), mark, final)

    def _run(self, messages: list[dict[str, str]], add_generation_prompt: bool, date: str | None) -> str:
        names: dict[str, Any] = {
            **self._special_tokens,
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if date is not None:
            names["strftime_now"] = TemplateFunction(_date_formatter(date))
        self._sandbox.start()
        try:
            return self._template.render(names)
        except Exception as error:  # a template can raise anything: its own errors, TypeError, and so on
            reason = _message(error)
        # Raised here, and not as the cause of that error: its traceback holds all that the template made.
        raise RequestError(
            f"the model's chat template does not accept these messages: {reason}",
            param="messages",
            code="chat_template_error",
        )


def _message(error: Exception) -> str:
    """What an error says, in one line that is not too long and can be shown and sent anywhere."""
    text = (error.message if isinstance(error, TemplateSyntaxError) else str(error)) or type(error).__name__
    if len(text) > _MAX_ERROR_CHARS:
        text = text[:_MAX_ERROR_CHARS] + "..."
    line = f" (line {error.lineno})" if isinstance(error, TemplateSyntaxError) else ""
    return "".join(letter if letter.isprintable() else " " for letter in text) + line


def _plain(message: ChatMessage) -> dict[str, str]:
    plain = {"role": message.role, "content": message.content}
    return plain if message.name is None else plain | {"name": message.name}


def _mark_that_is_not_in(messages: Sequence[Mapping[str, str]]) -> str:
    """Put behind the final message to find out where the template writes its end.

    The blank at its end shows whether the template trims messages.
    """
    marks = (f"KSANA CONTINUES THIS MESSAGE {number} " for number in count())
    return next(mark for mark in marks if not any(mark.strip() in m["content"] for m in messages))


def _cut_at_mark(text: str, mark: str, final: str) -> str:
    start = text.rfind(mark.rstrip())
    if start < 0 or final.strip() not in text:
        raise RequestError(
            "the model's chat template does not write the final message out as it is: it cannot be continued",
            param="continue_final_message",
            code="chat_template_error",
        )
    before = text[:start]
    return before if text.startswith(mark, start) else before.rstrip()


def _date_formatter(date: str) -> Callable[[str], str]:
    now = datetime.fromisoformat(date)

    def strftime_now(format: str) -> str:
        if len(format) > _MAX_DATE_FORMAT_CHARS:
            raise TemplateError(f"a date format has {len(format)} characters")
        return now.strftime(format)

    return strftime_now
