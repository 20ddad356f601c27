from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from ksana.config import Settings
from ksana.errors import RequestError
from ksana.gateway.app import create_app, create_gateway
from ksana.gateway.chat import CHAT_NEUTRAL, ChatRequest
from ksana.gateway.completions import COMPLETION_NEUTRAL, CompletionRequest
from ksana.gateway.generate import GENERATE_NEUTRAL, GenerateRequest
from ksana.gateway.request_body import decode
from tests.gateway.fake_client import FakeClient
from tests.gateway.serving import CHAT, COMPLETION, running

POSTS = ("/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/detokenize")

RUBBISH = [
    b"",
    b"null",
    b"5",
    b"[]",
    b'"x"',
    b"true",
    b"{",
    b"{}x",
    b"{'a': 1}",
    b'{"prompt": NaN}',
    b'{"prompt": Infinity}',
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b'{"prompt": "\xff"}',
    b'{"prompt": "\xed\xa0\x80"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\\ud800x"}',
    b'{"prompt": "\\udc00"}',
    b'{"\\ud800": 1}',
    b'{"\xff": 1}',
    b"[" * 200_000,
    b'{"a":' * 200_000,
    b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"max_tokens": ' + b"9" * 100_000 + b', "prompt": "x"}',
    b'{"temperature": ' + b"9" * 100_000 + b', "prompt": "x"}',
    b'{"temperature": 1e999, "prompt": "x"}',
    b'{"n": ' + b"9" * 100_000 + b"}",
    b'{"' + b"a" * 1_000_000 + b'": 1}',
    b"\x00" * 1000,
    b"--boundary\r\nContent-Disposition: form-data; name=x\r\n\r\n",
]


@pytest.mark.parametrize("path", POSTS)
async def test_rubbish_is_a_400_in_the_usual_form(path: str) -> None:
    async with running() as gateway:
        for body in RUBBISH:
            for kind in ("application/json", "multipart/form-data; boundary=x", "text/plain; charset=utf-16"):
                answer = await gateway.http.post(path, content=body, headers={"Content-Type": kind})
                assert answer.status_code == 400, (body[:40], answer.text[:200])
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
                assert len(answer.text) < 2000
        assert gateway.client.asked == []


@pytest.fixture
async def rubbish_app() -> AsyncIterator[Any]:
    async with trio.open_nursery() as nursery:
        yield create_app(create_gateway(FakeClient(nursery), Settings(model="x")))
        nursery.cancel_scope.cancel()


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)

FIELDS = sorted(
    {field for kind in (ChatRequest, CompletionRequest, GenerateRequest) for field in kind.__struct_fields__}
    | set(CHAT_NEUTRAL)
    | set(COMPLETION_NEUTRAL)
)

KINDS: list[tuple[Any, Any, dict[str, Any]]] = [
    (ChatRequest, CHAT_NEUTRAL, CHAT),
    (CompletionRequest, COMPLETION_NEUTRAL, COMPLETION),
    (GenerateRequest, GENERATE_NEUTRAL, {"prompt": "Hi"}),
]


@settings(max_examples=300)
@given(
    kind=st.sampled_from(KINDS),
    fields=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=6), json_values, max_size=3),
    bare=st.booleans(),
)
def test_any_field_of_any_value_is_understood_or_refused_by_name(
    kind: tuple[Any, Any, dict[str, Any]], fields: dict[str, Any], bare: bool
) -> None:
    struct, neutral, good = kind
    body = json.dumps(fields if bare else {**good, **fields}).encode()
    try:
        decode(body, struct, neutral)
        return
    except RequestError as refused:
        error = refused
    assert error.status == 400
    if error.code != "invalid_json":
        assert error.param is not None


async def test_any_body_of_any_route_never_is_a_500(rubbish_app: Any) -> None:
    """Bodies that are nearly right, through the whole application."""
    http = rubbish_app.test_client()
    rng = random.Random(1)
    values = [None, True, 0, -1, 1, 2**70, 0.5, 1e300, "", "x", "\u0000", [], [1], ["x"], [[1]], {}, {"a": 1}]
    goods: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": CHAT,
        "/v1/completions": COMPLETION,
        "/generate": {"prompt": "a", "sampling_config": {}},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [1]},
    }
    seen = set()
    for _ in range(600):
        path = rng.choice(POSTS)
        body = dict(goods[path])
        for _ in range(rng.randint(1, 2)):
            body[rng.choice(FIELDS)] = rng.choice(values)
        if "sampling_config" in body:
            body["sampling_config"] = {rng.choice(FIELDS): rng.choice(values)}
        answer = await http.post(path, data=json.dumps(body))
        seen.add(answer.status_code)
        assert answer.status_code in (200, 400, 404), (path, body, await answer.get_data(as_text=True))
    assert seen >= {200, 400}
