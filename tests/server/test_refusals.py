"""What a real server will not take: too many requests, too much of one, no key, and no HTTP at all."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Any

import pytest

from tests.processes import eventually
from tests.server.conftest import KEY
from tests.server.process import ServerProcess, post

GREEDY = {"temperature": 0, "ignore_eos": True}


def test_a_full_queue_is_a_429_and_later_it_is_not(strict: ServerProcess) -> None:
    body = {"prompt": "a", "max_tokens": 2000, "stream": True, **GREEDY}
    with strict.http(KEY) as http, contextlib.ExitStack() as taken:
        for _ in range(5):
            # On bare sockets, since those that wait have no answer yet.
            client = taken.enter_context(socket.create_connection(("127.0.0.1", strict.port)))
            client.sendall(post("/v1/completions", body, f"Authorization: Bearer {KEY}"))
        eventually(lambda: strict.metrics(KEY)["num_open_slots"] == 5)
        # Several prompts in one request are all or nothing.
        for changes in ({"stream": False}, {}, {"prompt": ["a", "b"]}):
            answer = http.post("/v1/completions", json=body | changes)
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full"
        taken.close()
        after = strict.wait_until_idle(KEY)
        assert after["requests_refused_total"] >= 3
        assert http.post("/v1/completions", json={**body, "max_tokens": 3}).status_code == 200


def test_every_route_asks_for_the_key(strict: ServerProcess) -> None:
    from ksana.config import Settings
    from ksana.gateway.app import create_app, create_gateway
    from tests.gateway.fake_client import FakeClient

    app = create_app(create_gateway(FakeClient(None), Settings(model="x")))  # type: ignore[arg-type]
    routes = {(rule.rule, method) for rule in app.url_map.iter_rules() for method in rule.methods or ()}
    assert {path for path, _ in routes} >= {
        *("/v1/chat/completions", "/v1/completions", "/v1/models", "/generate", "/tokenize", "/detokenize"),
        *("/health", "/ready", "/metrics", "/version"),
    }
    with strict.http() as http:
        for path, method in sorted(routes | {("/", "GET"), ("/nothing", "GET"), ("/v1/../v1/models", "GET")}):
            path = path.replace("<path:name>", strict.model)
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}):
                answer = http.request(method, path, headers=headers)
                wanted = 200 if path in ("/health", "/ready") else 401
                assert answer.status_code == wanted, (method, path)
        for trick in ("//v1/models", "/health/../metrics", "/health%2f..%2fmetrics", "/HEALTH", "/ready/x"):
            assert http.get(trick).status_code == 401, trick
    with strict.http(KEY) as http:
        for path in ("/v1/models", f"/v1/models/{strict.model}", "/metrics", "/version"):
            assert http.get(path).status_code == 200
    assert KEY not in strict.log


def test_a_body_too_large_is_a_413(strict: ServerProcess) -> None:
    with strict.http(KEY) as http:
        for path in ("/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/detokenize"):
            answer = http.post(path, json={"prompt": "a" * 20_000})
            assert answer.status_code == 413, path
            assert answer.json()["error"]["code"] == "body_too_large"
        pieces = iter([b'{"prompt": "', *[b"a" * 1000] * 30, b'"}'])
        assert http.post("/tokenize", content=pieces).status_code == 413
        # Over the same client: it was told which connections it may use again.
        assert http.post("/tokenize", content=b'{"prompt": "a"' + b" " * 19_000 + b"}").status_code == 200


BAD_BODIES = [
    b"",
    b"null",
    b"5",
    b"[]",
    b'"text"',
    b"{",
    b"{}",
    b"\xff\xfe",
    b'{"prompt": "\\ud800"}',
    b'{"prompt": 1e999}',
    b'{"prompt": {"a": 1}}',
    b'{"prompt": [[1, "a"]]}',
    b'{"prompt": [1, [2]]}',
    b'{"prompt": []}',
    b'{"prompt": [[]]}',
    b'{"prompt": [-1]}',
    b'{"prompt": [99999]}',
    b'{"prompt": [12345678901234567890123]}',
    b'{"prompt": "a", "n": 5000000}',
    b'{"prompt": "a", "logprobs": 1000000000}',
    b'{"prompt": "a", "max_tokens": 1000000000}',
    b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": 1e400}',
    b'{"prompt": "a", "seed": 1e30}',
    b'{"prompt": "a", "stop": [""]}',
    b'{"prompt": "a", "stop": {"a": 1}}',
    b'{"prompt": "a", "stop_token_ids": [4000000000]}',
    b'{"prompt": "a", "logit_bias": {"5": 1}}',
    b'{"prompt": "a", "stream": 1}',
    b'{"messages": "hi"}',
    b'{"messages": [{"role": "root", "content": "a"}]}',
    b'{"messages": [{"role": "user"}]}',
    b'{"tokens": [5000]}',
    b'{"tokens": "a"}',
    b"[" * 5000,
    b'{"prompt": ' + b"[" * 4000 + b"]" * 4000 + b"}",
]


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/detokenize"]
)
def test_bad_bodies_are_a_400(server: ServerProcess, path: str) -> None:
    with server.http() as http:
        for body in BAD_BODIES:
            answer = http.post(path, content=body)
            assert answer.status_code == 400, (body[:80], answer.text[:200])
            error = answer.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert error["message"]
        assert "Traceback" not in server.log


def test_text_that_is_hard_on_tokenizers(server: ServerProcess) -> None:
    texts = [
        "",
        " ",
        "\x00",
        "\x00" * 100,
        "\u202e",
        "\U0001f468‍\U0001f469‍\U0001f467",
        "e\u0301" * 50,
        "\r\n\t" * 40,
    ]
    texts += [
        "<|im_end|>",
        "<eos>",
        "<bos><bos>",
        "{{ 7*7 }}",
        "{% raw %}",
        "</s>" * 20,
        "\ufffd",
        "\U0010ffff",
    ]
    with server.http() as http:
        for text in texts:
            body: dict[str, Any] = {"max_tokens": 2, **GREEDY}
            chat = {**body, "messages": [{"role": "user", "content": text}]}
            assert http.post("/v1/chat/completions", json=chat).status_code == 200, text
            answer = http.post("/v1/completions", json={**body, "prompt": text})
            # Nothing at all leaves nothing to compute from, where a model puts no token before.
            assert answer.status_code == 200 or (text == "" and answer.status_code == 400), text
    assert "Traceback" not in server.log


RUBBISH = [
    b"\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),  # TLS
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64),
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 20_000,
    b"GET /health HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
    b"CONNECT other:443 HTTP/1.1\r\nHost: other\r\n\r\n",
    b"GET http://elsewhere/health HTTP/1.1\r\nHost: elsewhere\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x00" * 1000,
]


def test_rubbish_on_sockets(server: ServerProcess) -> None:
    rng = random.Random(0)
    noise = [rng.randbytes(rng.choice([1, 10, 100, 5000])) for _ in range(60)]
    sockets = []
    for data in [*RUBBISH, *noise]:
        client = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        sockets.append(client)
        with_reset = rng.random() < 0.3
        try:
            client.sendall(data)
            if with_reset:
                client.close()
            else:
                client.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it was refused before all was sent
    for client in sockets:
        received = b""
        try:
            while data := client.recv(65536) if client.fileno() >= 0 else b"":
                received += data
        except ConnectionResetError:
            pass
        client.close()
        assert not received or received.startswith(b"HTTP/1.1 "), received[:100]
        assert b" 500 " not in received[:20]
    with server.http() as http:
        assert http.get("/health").status_code == 200
        body = {"prompt": "a", "max_tokens": 3, **GREEDY}
        assert http.post("/v1/completions", json=body).status_code == 200
    server.wait_until_idle()
    assert "Traceback" not in server.log
