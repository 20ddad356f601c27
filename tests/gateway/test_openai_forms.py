"""Streams put together from parts: whatever the model is called and says."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana.gateway import sse
from ksana.gateway.openai_forms import ChatForm, CompletionForm
from ksana.messages.outputs import TextDelta
from tests.gateway.fake_client import MODEL, says
from tests.gateway.serving import CHAT, running, sse_data

NAMES = [
    "m987654321",
    "987654321",
    "\x00slot\x00",
    "slot",
    '","choices":[{"index":',
    '"},"logprobs":null,"finish_reason":null}]',
    'a"b\\c',
    "ä\u2028\u2029\x85\U0001f600",
    "a\nb\r\tc",
    "data: [DONE]\n\n",
    "}" * 5,
    "{0}%s%d%b",
    "",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("usage", [False, True])
async def test_a_model_may_be_called_anything(name: str, usage: bool) -> None:
    more = {"stream": True, "stream_options": {"include_usage": usage}}
    model = msgspec.structs.replace(MODEL, name=name)
    async with running(says("a", name, "987654321", "\x00slot\x00")) as gateway:
        gateway.client.model = model
        for path, prompt in (
            ("/v1/chat/completions", {"messages": CHAT["messages"]}),
            ("/v1/completions", {"prompt": "a"}),
        ):
            body = {"model": name, **prompt}
            whole = await gateway.post(path, body)
            assert whole.status_code == 200, whole.text
            assert whole.json()["model"] == name
            stream = await gateway.post(path, {**body, **more})
            events = sse_data(stream.text)
            assert events.pop() == "[DONE]"
            assert {one["model"] for one in events} == {name}
            choices = [choice for one in events for choice in one["choices"]]
            assert {choice["index"] for choice in choices} == {0}
            text = "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in choices)
            assert text == "a" + name + "987654321" + "\x00slot\x00"
        assert (await gateway.http.get("/v1/models")).json()["data"][0]["id"] == name


@given(st.text(), st.text(min_size=1), st.integers(0, 10**12), st.booleans())
def test_a_chunk_is_what_the_whole_object_would_be(name: str, text: str, index: int, usage: bool) -> None:
    """Put together from parts or encoded at once."""
    for form in (ChatForm(name, 7, usage), CompletionForm(name, 7, usage)):
        event = form.text(index, TextDelta(request_id=1, text=text, token_ids=(1,)))
        assert event == sse.event(form._chunk([form._choice(index, text, None)]))
        assert event.endswith(b"}\n\n")
        assert len(event.decode().splitlines()) == 2
