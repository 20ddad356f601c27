"""Bodies on their way in: all together are bounded, and compressed ones refused."""

from __future__ import annotations

import pytest

from ksana.gateway import bodies
from tests.gateway.fake_client import silent
from tests.gateway.serving import CHAT, COMPLETION, Running, connect, eventually, raw_post, read_all, running


def num_bytes(gateway: Running) -> int:
    return gateway.server._app.app.body_budget.num_bytes  # type: ignore[attr-defined, no-any-return]


async def test_bodies_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_BODIES_BYTES", 250_000)
    async with running(max_body_bytes=100_000) as gateway:
        request = raw_post("/v1/completions", {**COMPLETION, "prompt": "x" * 90_000})
        slow = [await connect(gateway.port) for _ in range(2)]
        for stream in slow:
            await stream.send_all(request[:-5])
        await eventually(lambda: num_bytes(gateway) > 175_000)

        answer = await gateway.post("/v1/completions", {**COMPLETION, "prompt": "x" * 90_000})
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "overloaded"
        assert (await gateway.post("/v1/completions", COMPLETION)).status_code == 200

        await slow[0].aclose()
        await eventually(lambda: num_bytes(gateway) < 100_000)
        answer = await gateway.post("/v1/completions", {**COMPLETION, "prompt": "x" * 90_000})
        assert answer.status_code == 200
        await slow[1].aclose()
        await eventually(lambda: num_bytes(gateway) == 0)


async def test_one_body_of_the_largest_size_always_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_BODIES_BYTES", 10)
    async with running(max_body_bytes=100_000) as gateway:
        answer = await gateway.post("/v1/completions", {**COMPLETION, "prompt": "x" * 90_000})
        assert answer.status_code == 200


async def test_every_end_of_a_request_gives_its_bytes_back() -> None:
    """Read, refused unread, too large, for no path at all, and still generating."""
    async with running(max_body_bytes=10_000, api_key="k") as gateway:
        key = {"Authorization": "Bearer k"}
        for path, headers, size, status in (
            ("/v1/completions", key, 5, 200),
            ("/v1/completions", {}, 5000, 401),
            ("/v1/completions", key, 500_000, 413),
            ("/nothing", key, 5000, 404),
            ("/health", key, 5000, 405),
        ):
            answer = await gateway.post(path, {**COMPLETION, "prompt": "x" * size}, **headers)
            assert answer.status_code == status
            await eventually(lambda: num_bytes(gateway) == 0)
        stream = await connect(gateway.port)
        await stream.send_all(
            b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello"
        )
        await read_all(stream)
        await eventually(lambda: num_bytes(gateway) == 0)


async def test_a_body_that_is_read_counts_no_more() -> None:
    async with running(silent) as gateway:
        stream = await connect(gateway.port)
        await stream.send_all(raw_post("/v1/chat/completions", CHAT))
        await eventually(lambda: len(gateway.client.asked) == 1)
        assert num_bytes(gateway) == 0
        await stream.aclose()


async def test_compressed_bodies_are_a_415() -> None:
    async with running() as gateway:
        for path in ("/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/detokenize"):
            for encoding, status in (("gzip", 415), ("br", 415), ("identity, gzip", 415), ("identity", 200)):
                body = {"prompt": "a"} if path in ("/generate", "/tokenize") else COMPLETION
                body = {"tokens": [1]} if path == "/detokenize" else body
                body = CHAT if path == "/v1/chat/completions" else body
                answer = await gateway.post(path, body, **{"Content-Encoding": encoding})
                assert answer.status_code == status, (path, encoding)
                if status == 415:
                    assert answer.json()["error"]["code"] == "unsupported_content_encoding"
