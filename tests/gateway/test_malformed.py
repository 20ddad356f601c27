"""Requests that fail before any route is found: the form of all errors, one line of log, a 4xx."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
import trio

from ksana.gateway.app import App, create_app
from ksana.gateway.asgi import HttpConnection
from ksana.gateway.host import fault_of_host
from tests.gateway.fake_client import FakeClient, says
from tests.gateway.serving import connect, eventually, read_all, running

V = b"GET /version HTTP/1.1\r\n"
X = b"Host: x\r\n"
P = b"POST /tokenize HTTP/1.1\r\n" + X

BAD_HOSTS = [
    b"a" * 64,
    b"a" * 64 + b".com",
    b"com." + b"a" * 64,
    b"a" * 10_000,
    b".".join([b"a" * 60] * 5),
    b"a..b",
    b".a",
    b".",
    b"..",
    b"a..",
    b"\xff\xfe",
    b"xn--\xe4",
    b"\xc3\xa4.de",
    "\u3002".encode(),
    b"user@x",
    b"user:pw@x",
    b"x:99999",
    b"x:65536",
    b"x:-1",
    b"x:+1",
    b"x: 80",
    b"x:0x50",
    b"x:80:80",
    b"x:abc",
    b"x:000080",
    b":x",
    b"[::1",
    b"::1",
    b"::1]",
    b"[]",
    b"[x]",
    b"[1.2.3.4]",
    b"[::1]x",
    b"[::1]:x",
    b"[[::1]]",
    b"[::1%eth0\xff]",
    b"[12345::]",
    b"a b",
    b"a\tb",
    b"a/b",
    b"a\\b",
    b"a?b",
    b"a#b",
    b"http://x",
    b"<x>",
    b'"x"',
    b"a%zz",
    b"a%",
    b"{x}",
    b"x|y",
    b"x^y",
    b"x`y",
]

GOOD_HOSTS = [
    b"",
    b"x",
    b"x:",
    b"x:80",
    b"x:65535",
    b"X.example",
    b"x.example.",
    b"my_service:8000",
    b"a" * 63 + b".com",
    b"xn--bcher-kva.example",
    b"127.0.0.1:8000",
    b"1.2.3.4",
    b"999.1.1.1",
    b"[::1]",
    b"[::1]:8000",
    b"[::ffff:1.2.3.4]:1",
    b"a-b.c-d",
    b"a%20b",
    b"~x",
    b"localhost:8000",
]

OTHERS = [
    b"GET /version HTTP/1.1\r\n",
    V + X + b"Host: y\r\n",
    V + X + X,
    V + b"Host : x\r\n",
    V + b" Host: x\r\n",
    V + X + b"No colon\r\n",
    V + X + b": empty\r\n",
    V + X + b"A\x00B: y\r\n",
    V + X + b"A B: y\r\n",
    V + X + b"\xff: y\r\n",
    V + X + b"A(B): y\r\n",
    V + X + b"A: y\x00z\r\n",
    V + X + b"A: y\rz\r\n",
    V + X + b"A: \x1b[31m\x00\r\n",
    V + b"Host: x\x00\r\n",
    V + b"Host: x\ry\r\n",
    P + b"Content-Length: -1\r\n",
    P + b"Content-Length: +2\r\n",
    P + b"Content-Length: 0x2\r\n",
    P + b"Content-Length: 2.0\r\n",
    P + b"Content-Length: \r\n",
    P + b"Content-Length: two\r\n",
    P + "Content-Length: \u0662\r\n".encode(),
    P + b"Content-Length: 2, 3\r\n",
    P + b"Content-Length: 2\r\nContent-Length: 3\r\n",
    P + b"Content-Length: 2 2\r\n",
    P + b"Content-Length: " + b"9" * 5000 + b"\r\n",
    P + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n",
    P + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n",
    P + b"Transfer-Encoding: gzip\r\n",
    P + b"Transfer-Encoding: identity\r\n",
    P + b"Transfer-Encoding: chunked, chunked\r\n",
    P + b"Transfer-Encoding: gzip, chunked\r\n",
    P + b"Transfer-Encoding: \r\n",
    P + b"Transfer-Encoding: xchunked\r\n",
    P + b"Transfer-Encoding: chunked\x0b\r\n",
    b"POST /tokenize HTTP/1.0\r\nTransfer-Encoding: chunked\r\n",
    b"GET / HTTP/9.9\r\n" + X,
    b"GET / HTTP/2.0\r\n" + X,
    b"GET / HTTP/0.9\r\n" + X,
    b"GET / HTTP/1\r\n" + X,
    b"GET / HTTP/1.11\r\n" + X,
    b"GET / HTTP/-1.1\r\n" + X,
    b"GET / http/1.1\r\n" + X,
    b"GET / HTTPS/1.1\r\n" + X,
    b"GET / FTP/1.1\r\n" + X,
    b"GET /\r\n" + X,
    b"GET\r\n" + X,
    b"GET  / HTTP/1.1\r\n" + X,
    b"GET / HTTP/1.1 \r\n" + X,
    b" GET / HTTP/1.1\r\n" + X,
    b"GET /a b HTTP/1.1\r\n" + X,
    b"GET /\x00 HTTP/1.1\r\n" + X,
    b"GET /\x1b[31m HTTP/1.1\r\n" + X,
    b"GET /\xff HTTP/1.1\r\n" + X,
    "GET /ä HTTP/1.1\r\n".encode() + X,
    b"GET /version?\xff HTTP/1.1\r\n" + X,
    b"G\xc3\x84T / HTTP/1.1\r\n" + X,
    b"G(T / HTTP/1.1\r\n" + X,
    b"\x00 / HTTP/1.1\r\n" + X,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n",
    b"PRI * HTTP/2.0\r\n",
    b"SSH-2.0-OpenSSH_9.0\r\n",
    b"\r\n\r\n\x00\r\n",
    b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\n" + X,
    V + X + b"A: " + b"a" * 40_000 + b"\r\n",
    V + X + b"A: b\r\n" * 10_000,
    b"CONNECT x:443 HTTP/1.1\r\n" + X,
    b"CONNECT / HTTP/1.1\r\n" + X,
    b"OPTIONS * HTTP/1.1\r\n" + X,
    b"GET * HTTP/1.1\r\n" + X,
    b"GET version HTTP/1.1\r\n" + X,
    b"GET ../version HTTP/1.1\r\n" + X,
    b"GET //x/version HTTP/1.1\r\n" + X,
    b"GET /v1//models HTTP/1.1\r\n" + X,
    b"GET /%00 HTTP/1.1\r\n" + X,
    b"GET /%ff%fe HTTP/1.1\r\n" + X,
    b"GET /%zz HTTP/1.1\r\n" + X,
    b"GET /% HTTP/1.1\r\n" + X,
    b"GET /%0d%0aX:%20y HTTP/1.1\r\n" + X,
    b"GET /%1b%5b31m HTTP/1.1\r\n" + X,
    b"GET /v1/models/%ed%a0%80 HTTP/1.1\r\n" + X,
    b"GET /v1/models/%0a%0d%e2%80%ae HTTP/1.1\r\n" + X,
    b"GET http:// HTTP/1.1\r\n" + X,
    b"GET http://[ HTTP/1.1\r\n" + X,
    b"GET http://[::1:x/nothing HTTP/1.1\r\n" + X,
    b"GET file:///etc/passwd HTTP/1.1\r\n" + X,
    b"GET : HTTP/1.1\r\n" + X,
    b"GET ? HTTP/1.1\r\n" + X,
    b"GET # HTTP/1.1\r\n" + X,
    b"BREW /version HTTP/1.1\r\n" + X,
    b"TRACE /version HTTP/1.1\r\n" + X,
    b"DELETE /version HTTP/1.1\r\n" + X,
    b"__CLASS__ /version HTTP/1.1\r\n" + X,
    b"A" * 5000 + b" /version HTTP/1.1\r\n" + X,
    P + b"Content-Length: 2\r\nContent-Encoding: gzip\r\n",
    P + b"Content-Length: 2\r\nContent-Encoding: \xff\r\n",
    P + b"Content-Length: 2\r\nExpect: \xff\r\n",
    P + b"Content-Length: 2\r\nContent-Type: application/json; charset=\xff; boundary=\r\n",
    P + b"Content-Length: 2\r\nContent-Type: multipart/form-data; boundary=" + b"b" * 5000 + b"\r\n",
    P + b"Content-Length: 2\r\nContent-Type: application/x-www-form-urlencoded; charset=rot13\r\n",
    P + b'Content-Length: 2\r\nCookie: \xff=;;;"\\\r\nAccept-Encoding: ;q=\r\n',
    P + b"Content-Length: 2\r\nX-Forwarded-Host: " + b"a" * 64 + b"\r\nX-Forwarded-Port: x\r\n",
    P
    + b"Content-Length: 2\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: \xff\r\n",
    P + b"Content-Length: 2\r\nOrigin: \xff\r\nAccess-Control-Request-Method: \xff\r\n",
    P + b"Content-Length: 2\r\nAuthorization: \xff \xff\r\nX-Request-Id: \xff\r\n",
    P + b"Content-Length: 2\r\nIf-Modified-Since: \xff\r\nRange: bytes=-\r\n",
]

MALFORMED = [V + b"Host: " + host + b"\r\n" for host in BAD_HOSTS] + OTHERS


async def ask(port: int, head: bytes) -> bytes:
    stream = await connect(port)
    body = b"{}" if b"Content-Length: 2\r\n" in head else b""
    try:
        await stream.send_all(head + b"Connection: close\r\n\r\n" + body)
        return await read_all(stream)
    finally:
        await stream.aclose()


def own_lines(caplog: Any) -> list[logging.LogRecord]:
    return [one for one in caplog.records if one.name.startswith(("ksana", "hypercorn", "quart"))]


@pytest.mark.parametrize("api_key", [None, "secret"])
async def test_malformed_requests_get_a_4xx_in_the_form_of_errors_and_one_line(
    api_key: str | None, caplog: Any
) -> None:
    assert len(MALFORMED) >= 100
    caplog.set_level("INFO")
    async with running(says("a"), api_key=api_key) as gateway:
        for head in MALFORMED:
            caplog.clear()
            received = await ask(gateway.port, head)
            assert received.count(b"HTTP/1.1 ") == 1, head[:100]
            status = int(received.split()[1])
            assert 400 <= status < 500 or status in (501, 505), (head[:100], status)
            answer_head, _, body = received.partition(b"\r\n\r\n")
            error = msgspec.json.decode(body)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"]
            assert b"x-request-id: " in answer_head
            request_id = answer_head.partition(b"x-request-id: ")[2].split()[0].decode()
            await eventually(lambda: len(own_lines(caplog)) > 0)
            (line,) = own_lines(caplog)
            text = line.getMessage()
            assert line.exc_info is None
            assert text.isascii(), head[:100]
            assert text.isprintable(), head[:100]
            assert len(text) < 900
            assert f" {status} " in text
            assert f" {request_id} " in text
            assert 'reason="' in text
        assert gateway.client.asked == []


@pytest.mark.parametrize("host", BAD_HOSTS)
def test_hosts_that_are_none(host: bytes) -> None:
    assert fault_of_host(host)


@pytest.mark.parametrize("host", GOOD_HOSTS)
async def test_hosts_that_are_some(host: bytes) -> None:
    async with running() as gateway:
        assert (await ask(gateway.port, V + b"Host: " + host + b"\r\n")).startswith(b"HTTP/1.1 200 ")


async def test_what_the_framework_raises_before_routing_is_the_client_s_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Whatever it is: no list of cases can be complete."""
    caplog.set_level("INFO")

    def explode(*args: Any, **more: Any) -> None:  # noqa: ARG001
        raise UnicodeError("secret detail")

    monkeypatch.setattr(App, "request_context", explode)
    async with running() as gateway:
        await _expect(gateway.port, caplog, 400, "cannot be understood")
    monkeypatch.undo()
    monkeypatch.setattr(HttpConnection, "_create_request_from_scope", explode)
    async with running() as gateway:
        await _expect(gateway.port, caplog, 400, "cannot be understood")


async def test_what_the_framework_raises_later_is_a_500(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    caplog.set_level("INFO")

    async def explode(*args: Any, **more: Any) -> None:  # noqa: ARG001
        raise ValueError("secret detail")

    monkeypatch.setattr(App, "finalize_request", explode)
    monkeypatch.setattr(App, "handle_exception", explode)
    async with running() as gateway:
        stream = await connect(gateway.port)
        await stream.send_all(V + X + b"Connection: close\r\n\r\n")
        received = await read_all(stream)
        assert received.startswith(b"HTTP/1.1 500 ")
        assert b"secret" not in received
        error, line = own_lines(caplog)
        assert "ValueError at " in error.getMessage()
        assert error.exc_info is None
        assert " 500 " in line.getMessage()
        assert "code=internal_error" in line.getMessage()
        assert "secret" not in caplog.text


async def test_what_fails_in_the_middle_of_a_stream_cuts_it(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    from ksana.gateway.openai_forms import ChatForm
    from tests.gateway.serving import CHAT, raw_post

    caplog.set_level("INFO")

    def explode(*args: Any, **more: Any) -> bytes:  # noqa: ARG001
        raise ValueError("secret detail")

    monkeypatch.setattr(ChatForm, "finished", explode)
    async with running(says("a", "b", pause_s=0.02)) as gateway:
        stream = await connect(gateway.port)
        await stream.send_all(raw_post("/v1/chat/completions", {**CHAT, "stream": True}))
        received = await read_all(stream)
        assert received.startswith(b"HTTP/1.1 200 ")
        assert not received.endswith(b"0\r\n\r\n")
        await eventually(lambda: len(own_lines(caplog)) == 2)
        error, line = own_lines(caplog)
        assert error.exc_info is None
        assert " 200 " in line.getMessage()
        assert "failed=500" in line.getMessage()


async def _expect(port: int, caplog: Any, status: int, text: str) -> None:
    caplog.clear()
    received = await ask(port, V + X)
    assert received.startswith(b"HTTP/1.1 %d " % status), received
    assert msgspec.json.decode(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_request"
    assert b"secret" not in received
    (line,) = own_lines(caplog)
    assert text in line.getMessage()
    assert line.exc_info is None


async def test_a_host_that_only_the_application_sees() -> None:
    """As from another server than ours."""
    async with trio.open_nursery() as nursery:
        from ksana.config import Settings
        from ksana.gateway.app import create_gateway

        app = create_app(create_gateway(FakeClient(nursery), Settings(model="x")))
        sent: list[Any] = []

        async def receive() -> Any:
            await trio.sleep_forever()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": "/version",
            "query_string": b"",
            "headers": [(b"host", b"a" * 64 + b".com")],
        }
        with trio.fail_after(5):
            await app(scope, receive, send)  # type: ignore[arg-type]
        assert sent[0]["status"] == 400
        assert msgspec.json.decode(sent[1]["body"])["error"]["code"] == "invalid_request"
        nursery.cancel_scope.cancel()
