"""How chat and completion results look in OpenAI's API. Streams build each chunk around constant bytes."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from ksana.gateway import sse
from ksana.gateway.answer import Result
from ksana.gateway.errors import ApiError, error_body
from ksana.messages.outputs import Finished, PromptAccepted, TextDelta, Usage

FINGERPRINT = f"ksana-{version('ksana')}"


def usage_object(usages: Sequence[Usage]) -> dict[str, Any]:
    """Token counts of all prompts together."""
    prompt = sum(usage.num_prompt_tokens for usage in usages)
    output = sum(usage.num_output_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(usage.num_cached_tokens for usage in usages)},
    }


class _OpenAiForm:
    """The head of every object, and the parts of a stream that chat and completions share."""

    content_type = sse.CONTENT_TYPE
    prefix: str
    whole_kind: str
    chunk_kind: str
    before_text: bytes
    """A choice of a chunk, from behind the number of its index to its text."""
    after_text: bytes
    """From behind the text to the end of the choice."""

    def __init__(self, model: str, created: int, include_usage: bool) -> None:
        self._head = {
            "id": self.prefix + secrets.token_hex(16),
            "object": self.whole_kind,
            "created": created,
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._include_usage = include_usage
        # What all chunks with text have in common is encoded once; each part by itself, so that it does not
        # matter what the model is called.
        head = sse.encode_line({**self._head, "object": self.chunk_kind}).removesuffix(b"}")
        self._before_index = b"data: " + head + b',"choices":[{"index":'
        self._after_text = self.after_text + b"]" + (b',"usage":null' if include_usage else b"") + b"}\n\n"

    def _choice(self, index: int, text: str | None, finished: Finished | None) -> dict[str, Any]:
        """A choice of a chunk, equal to what `before_text` and `after_text` make where it has a text."""
        raise NotImplementedError

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_kind, "choices": choices}
        if self._include_usage:
            chunk["usage"] = usage
        return chunk

    def text(self, index: int, event: TextDelta) -> bytes:
        if not event.text:
            return b""
        text = sse.encode_line(event.text)
        return b"%b%d%b%b%b" % (self._before_index, index, self.before_text, text, self._after_text)

    def finished(self, index: int, finished: Finished) -> bytes:
        return sse.event(self._chunk([self._choice(index, None, finished)]))

    def closing(self, usages: Sequence[Usage]) -> bytes:
        last = sse.event(self._chunk([], usage_object(usages))) if self._include_usage else b""
        return last + sse.DONE

    def failed(self, error: ApiError) -> bytes:
        return sse.event(error_body(error))


class ChatForm(_OpenAiForm):
    prefix = "chatcmpl-"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    before_text = b',"delta":{"content":'
    after_text = b'},"logprobs":null,"finish_reason":null}'

    def _choice(self, index: int, text: str | None, finished: Finished | None) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {} if text is None else {"content": text},
            "logprobs": None,
            "finish_reason": finished.reason if finished else None,
            **({"stop_reason": finished.stop_reason} if finished else {}),
        }

    def accepted(self, index: int, _event: PromptAccepted) -> bytes:
        """The first chunk of a choice says who speaks."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return sse.event(self._chunk([choice]))

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": result.text, "refusal": None},
                "logprobs": None,
                "finish_reason": result.finished.reason,
                "stop_reason": result.finished.stop_reason,
            }
            for index, result in enumerate(results)
        ]
        return {**self._head, "choices": choices, "usage": usage_object([one.usage for one in results])}


class CompletionForm(_OpenAiForm):
    prefix = "cmpl-"
    whole_kind = "text_completion"
    chunk_kind = "text_completion"
    before_text = b',"text":'
    after_text = b',"logprobs":null,"finish_reason":null}'

    def _choice(self, index: int, text: str | None, finished: Finished | None) -> dict[str, Any]:
        return {
            "index": index,
            "text": text or "",
            "logprobs": None,
            "finish_reason": finished.reason if finished else None,
            **({"stop_reason": finished.stop_reason} if finished else {}),
        }

    def accepted(self, _index: int, _event: PromptAccepted) -> bytes:
        return b""

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        choices = [self._choice(index, one.text, one.finished) for index, one in enumerate(results)]
        return {**self._head, "choices": choices, "usage": usage_object([one.usage for one in results])}
