"""What `ksana chat` sends and understands, without a server."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana.cli.conversation import Conversation, error_text, printable, read_chunks
from ksana.errors import ServiceError

ANSWER = [
    ": a comment",
    'data: {"id":"x","choices":[{"index":0,"delta":{"role":"assistant","content":null}}]}',
    "",
    'data: {"choices":[{"delta":{"content":"Hel"}}]}',
    'data:{"choices":[{"delta":{"content":"lo"},"finish_reason":"stop"}]}',
    'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}}',
    "data: [DONE]",
    "data: never read",
]


def test_a_streamed_answer() -> None:
    chunks = list(read_chunks(ANSWER))
    assert "".join(chunk.text for chunk in chunks) == "Hello"
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "stop", None]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2


@pytest.mark.parametrize("num_lines", range(7))
def test_a_stream_without_its_end_is_an_error(num_lines: int) -> None:
    with pytest.raises(ServiceError, match="before it was complete"):
        list(read_chunks(ANSWER[:num_lines]))


@pytest.mark.parametrize(
    "line", ["data: {", "data: 5", 'data: {"choices": 5}', 'data: {"choices": [{"delta": 1}]}']
)
def test_what_is_no_answer(line: str) -> None:
    with pytest.raises(ServiceError, match="no chat answer"):
        list(read_chunks([line]))


def test_an_error_in_the_stream() -> None:
    with pytest.raises(ServiceError, match="the worker died"):
        list(read_chunks(['data: {"error": {"message": "the worker died", "type": "server_error"}}']))


def test_error_text() -> None:
    assert error_text(400, b'{"error": {"message": "too long"}}') == "too long"
    assert error_text(502, b"<html>") == "the server answered with status 502"
    assert error_text(500, b"null") == "the server answered with status 500"


def test_a_conversation_grows_and_is_reset() -> None:
    conversation = Conversation(model="m", system="Be brief.", temperature=0.0, seed=None)
    request = conversation.request("one")
    assert request["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
    ]
    assert request["temperature"] == 0.0
    assert "seed" not in request
    assert request["stream"] is True
    conversation.add("one", "1")
    assert [message["content"] for message in conversation.request("two")["messages"]] == [
        "Be brief.",
        "one",
        "1",
        "two",
    ]
    conversation.reset()
    assert conversation.request("one") == request


@given(st.text())
def test_printable_keeps_text_and_drops_commands(text: str) -> None:
    shown = printable(text)
    assert not any((ord(c) < 0x20 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 for c in shown)
    assert printable(shown) == shown
    assert [c for c in text if c.isalnum()] == [c for c in shown if c.isalnum()]


def test_printable_drops_escapes_and_reordering() -> None:
    assert printable("a\x1b[2Jb\r\u202ec\x9bd\n\te🙂é") == "a[2Jbcd\n\te🙂é"
