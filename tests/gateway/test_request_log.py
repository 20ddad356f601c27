"""The log's line of a request: what was refused and why, on one line, and nothing of what prompts say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana.errors import RequestError, ServiceError
from ksana.gateway.request_log import log_request
from ksana.messages.outputs import Failed
from tests.gateway.fake_client import endless, fails, says
from tests.gateway.serving import CHAT, connect, eventually, raw_post, read_until, running

ID = {"X-Request-Id": "find-me"}


def lines_of(caplog: Any) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name.startswith("ksana.gateway")]


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        (
            "/v1/chat/completions",
            {**CHAT, "temperature": 200},
            '400 param=temperature code=invalid_value reason="temperature must be between 0 and 100, not 2',
        ),
        ("/v1/chat/completions", {**CHAT, "temperatur": 1}, "400 param=temperatur code=unknown_parameter"),
        ("/v1/chat/completions", {**CHAT, "n": 2}, "400 param=n code=unsupported_parameter"),
        ("/v1/chat/completions", {"model": "fake"}, "400 param=messages code=missing_parameter"),
        ("/v1/chat/completions", {**CHAT, "model": "other"}, "404 param=model code=model_not_found"),
        ("/v1/completions", {"prompt": []}, "400 param=prompt code=invalid_value"),
        ("/generate", {"prompt": "a", "sampling_config": {"topk": -5}}, "400 param=sampling_config.topk"),
        ("/tokenize", {}, "400 param=prompt code=invalid_request_error"),
        ("/tokenize", b"{", '400 code=invalid_json reason="the body is not valid JSON'),
        ("/nothing", {}, '404 code=not_found reason="there is no such path here"'),
        ("/health", {}, "405 code=method_not_allowed"),
        ("/tokenize", b" " * 20_000, "413 code=body_too_large"),
    ],
)
async def test_a_refusal_has_field_code_and_reason(path: str, body: Any, wanted: str, caplog: Any) -> None:
    caplog.set_level("INFO")
    async with running(max_body_bytes=10_000) as gateway:
        if isinstance(body, bytes):
            await gateway.http.post(path, content=body, headers=ID)
        else:
            await gateway.post(path, body, **ID)
        await eventually(lambda: lines_of(caplog))
    (line,) = lines_of(caplog)
    status, rest = wanted.split(" ", 1)
    assert line.startswith(f"POST '{path}' {status} ")
    assert f" ms find-me {rest}" in line


async def test_a_missing_key_a_full_queue_and_a_failure(caplog: Any) -> None:
    caplog.set_level("INFO")
    async with running(api_key="secret") as gateway:
        await gateway.http.get("/metrics", headers=ID)
        await gateway.http.get("/v1/models", headers={**ID, "Authorization": "Bearer hunter2"})
    missing, wrong = lines_of(caplog)
    assert "GET '/metrics' 401 " in missing
    assert "code=invalid_api_key" in missing
    assert "wrong API key" in wrong
    assert "hunter2" not in caplog.text
    caplog.clear()
    async with running(endless(), capacity=1) as gateway:
        stream = await connect(gateway.port)
        await stream.send_all(raw_post("/v1/chat/completions", {**CHAT, "stream": True}))
        await read_until(stream, b'"x')
        assert (await gateway.post("/v1/chat/completions", CHAT)).status_code == 429
        await eventually(lambda: lines_of(caplog))
        assert "429" in lines_of(caplog)[0]
        assert "code=queue_full" in lines_of(caplog)[0]
        gateway.client.change_status(worker_state="given_up")
        assert (await gateway.http.get("/ready")).status_code == 503
        await eventually(lambda: len(lines_of(caplog)) == 2)
        assert "GET '/ready' 503 " in lines_of(caplog)[1]
        assert "code=not_ready" in lines_of(caplog)[1]
        await stream.aclose()


async def test_a_stream_that_fails_under_way_says_so(caplog: Any) -> None:
    caplog.set_level("INFO")
    failed = Failed(status=503, message="the worker died", code="worker_lost")
    async with running(fails(failed, "a")) as gateway:
        answer = await gateway.post("/v1/chat/completions", {**CHAT, "stream": True})
        assert answer.status_code == 200
        await eventually(lambda: lines_of(caplog))
    (line,) = lines_of(caplog)
    assert " 200 " in line
    assert 'failed=503 code=worker_lost reason="the worker died"' in line


async def test_a_good_request_has_no_reason(caplog: Any) -> None:
    caplog.set_level("INFO")
    async with running(says("a")) as gateway:
        await gateway.post("/v1/chat/completions", CHAT, **ID)
        await gateway.http.get("/health")
        await eventually(lambda: lines_of(caplog))
    (line,) = lines_of(caplog)
    assert line.startswith("POST '/v1/chat/completions' 200 ")
    assert line.endswith(" ms find-me")


SECRET = "my diary says 4711"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": SECRET, "content": "user"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": {"text": SECRET}}]}),
        ("/v1/chat/completions", {"messages": SECRET}),
        ("/v1/chat/completions", {**CHAT, "temperature": SECRET}),
        ("/v1/chat/completions", {**CHAT, "stop": [SECRET, ""]}),
        ("/v1/chat/completions", {**CHAT, "stop": {"a": SECRET}}),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": SECRET}}),
        ("/v1/completions", {"prompt": {"a": SECRET}}),
        ("/v1/completions", {"prompt": [SECRET, 5]}),
        ("/v1/completions", {"prompt": SECRET, "n": 2}),
        ("/v1/completions", {"prompt": "a" * 5000 + SECRET}),
        ("/generate", {"prompt": SECRET, "input_tokens": [1]}),
        ("/generate", {"prompt": [SECRET]}),
        ("/tokenize", {"prompt": [SECRET]}),
        ("/detokenize", {"tokens": SECRET}),
        ("/tokenize", b'{"prompt": "' + SECRET.encode()),
        ("/tokenize", b'{"prompt": "' + SECRET.encode() + b'\xff"}'),
        ("/tokenize", b'"' + SECRET.encode() + b'"'),
    ],
)
async def test_prompts_are_not_told(path: str, body: Any, caplog: Any) -> None:
    caplog.set_level("INFO")
    async with running() as gateway:
        if isinstance(body, bytes):
            answer = await gateway.http.post(path, content=body)
        else:
            answer = await gateway.post(path, body)
        if "a" * 100 not in str(body):  # the toy tokenizer takes any length
            assert answer.status_code == 400
        await eventually(lambda: lines_of(caplog))
    assert "4711" not in caplog.text


async def test_what_a_template_says_is_left_out(caplog: Any) -> None:
    caplog.set_level("INFO")
    text = f"the model's chat template does not accept these messages: invalid literal for int(): '{SECRET}'"
    failed = Failed(
        status=400,
        message=text,
        param="prompt",
        code="chat_template_error",
        error_type="invalid_request_error",
    )
    async with running(fails(failed)) as gateway:
        answer = await gateway.post("/v1/chat/completions", CHAT)
        assert SECRET in answer.json()["error"]["message"]
        await eventually(lambda: lines_of(caplog))
    (line,) = lines_of(caplog)
    assert "param=messages code=chat_template_error reason=\"the model's chat template does not" in line
    assert "4711" not in line


async def test_names_cannot_break_the_line(caplog: Any) -> None:
    caplog.set_level("INFO")
    evil = "x\r\n12:00:00 POST '/admin' 200\x1b[31m\u2028\u202e\"" + "y" * 5000
    async with running() as gateway:
        await gateway.post("/v1/chat/completions", {**CHAT, evil: 1})
        await gateway.post("/v1/chat/completions", {**CHAT, "model": evil})
        await gateway.post("/v1/chat/completions", {**CHAT, "metadata": {evil: 5}})
        await gateway.http.get("/%0d%0a%1b%5b31m%e2%80%a8" + "z" * 1000)
        await gateway.http.request("A" * 3000, "/version")
        await eventually(lambda: len(lines_of(caplog)) == 5)
    for line in lines_of(caplog):
        assert line.isascii()
        assert line.isprintable()
        assert len(line) < 1200


@given(
    st.text(), st.text(), st.text() | st.none(), st.text() | st.none(), st.text(max_size=2000), st.booleans()
)
def test_a_line_is_a_line(
    method: str, path: str, param: str | None, code: str | None, reason: str, is_ours: bool
) -> None:
    from logging import Handler, LogRecord, getLogger

    told: list[str] = []

    class Ears(Handler):
        def emit(self, record: LogRecord) -> None:
            told.append(record.getMessage())

    log, ears = getLogger("ksana.gateway"), Ears()
    log.addHandler(ears)
    before = log.level
    log.setLevel("INFO")
    try:
        log_request(
            method=method,
            path=path,
            status=400,
            is_complete=True,
            duration_s=0.001,
            request_id="id",
            refusal=ServiceError(reason, status=503, code=code)
            if is_ours
            else RequestError(reason, param=param, code=code),
        )
    finally:
        log.removeHandler(ears)
        log.setLevel(before)
    (line,) = told
    assert line.isascii()
    assert line.isprintable()
    assert line.endswith('"')
    assert len(line) < 6000
