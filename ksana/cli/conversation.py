"""A conversation with a chat endpoint, without the talking: what to send, and what came back.

Pure; `ksana.cli.chat` does the input and output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from ksana.errors import ServiceError

_DROPPED = {
    code: None
    for code in (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    if chr(code) not in "\n\t"
}


class Conversation:
    """The messages so far. A question counts as asked only once an answer (or a part of one) is there."""

    def __init__(self, *, model: str, system: str | None = None, **sampling: Any) -> None:
        """`sampling` holds fields of the request such as temperature; those that are None are left out."""
        self._model = model
        self._sampling = {name: value for name, value in sampling.items() if value is not None}
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)

    def __len__(self) -> int:
        return len(self._messages)

    def request(self, question: str) -> dict[str, Any]:
        """The body that asks `question` after all that was said."""
        return {
            "model": self._model,
            "messages": [*self._messages, {"role": "user", "content": question}],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._sampling,
        }

    def add(self, question: str, answer: str) -> None:
        self._messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._messages = list(self._opening)


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Error(msgspec.Struct):
    message: str


class Chunk(msgspec.Struct):
    """One event of a streamed answer, as far as a chat needs it."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None

    @property
    def text(self) -> str:
        return "".join(choice.delta.content or "" for choice in self.choices)

    @property
    def finish_reason(self) -> str | None:
        return next((choice.finish_reason for choice in self.choices if choice.finish_reason), None)


def read_chunks(lines: Iterable[str]) -> Iterator[Chunk]:
    """The events of a server-sent stream, up to `[DONE]`.

    Raises ServiceError for an error event, for lines that are no such stream, and for a stream that ends
    without `[DONE]`: a cut-off answer must not look like a whole one.
    """
    for line in lines:
        field, _, data = line.partition(":")
        if field != "data":
            continue
        data = data.removeprefix(" ")
        if data == "[DONE]":
            return
        try:
            chunk = msgspec.json.decode(data, type=Chunk)
        except msgspec.DecodeError as error:
            raise ServiceError(f"the server sent what is no chat answer: {error}") from None
        if chunk.error is not None:
            raise ServiceError(chunk.error.message)
        yield chunk
    raise ServiceError("the server ended the answer before it was complete")


def error_text(status: int, body: bytes) -> str:
    """What an error answer says: the message of an OpenAI error body, or the status where there is none."""
    try:
        chunk = msgspec.json.decode(body, type=Chunk)
    except (msgspec.DecodeError, UnicodeDecodeError):
        chunk = Chunk()
    return f"the server answered with status {status}" if chunk.error is None else chunk.error.message


def printable(text: str) -> str:
    """The text without what commands a terminal: control characters but newline and tab, and the marks
    that reorder text. A model writes whatever it likes, and a terminal obeys."""
    return text.translate(_DROPPED)
