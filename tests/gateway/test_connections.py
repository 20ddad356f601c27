"""HTTP as it comes over a socket: closing, keeping alive, limits, and what is no HTTP at all."""

from __future__ import annotations

import contextlib

import pytest
import trio

from ksana.gateway import app as app_module
from ksana.gateway import connection
from ksana.gateway import server as server_module
from tests.gateway.fake_client import endless, says
from tests.gateway.serving import CHAT, connect, eventually, raw_post, read_all, read_until, running

STREAM = {**CHAT, "stream": True}
GET = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("version", "headers"), [("1.1", ["Connection: close"]), ("1.0", []), ("1.0", ["Connection: close"])]
)
async def test_the_connection_is_closed_after_the_answer(
    body: object, version: str, headers: list[str]
) -> None:
    async with running(says("a", "b")) as gateway:
        stream = await connect(gateway.port)
        await stream.send_all(raw_post("/v1/chat/completions", body, *headers, version=version))
        received = await read_all(stream, 2)
        assert received.startswith(b"HTTP/1.1 200 ")
        assert b'"length"' in received
        await eventually(lambda: len(gateway.server._connections) == 0)


async def test_a_connection_is_used_again() -> None:
    async with running(says("a")) as gateway:
        stream = await connect(gateway.port)
        for body in (CHAT, STREAM, CHAT):
            await stream.send_all(raw_post("/v1/chat/completions", body))
            await read_until(stream, b"0\r\n\r\n" if body is STREAM else b'"cached_tokens":1}}}')
        await stream.send_all(GET * 3)  # pipelined
        received = b""
        while received.count(b'"version"') < 3:
            received += await read_until(stream, b"}")
        await stream.aclose()


async def test_a_client_is_told_when_its_connection_cannot_be_used_again() -> None:
    """Only then: a refusal that does not wait for the rest of the body, unlike one that has read it."""
    async with running(says("a"), api_key="secret") as gateway:
        stream = await connect(gateway.port)
        for path, status in (("/v1/models", 401), ("/nothing", 401), ("/health", 200)):
            await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            head = await read_until(stream, b"}")
            assert head.startswith(b"HTTP/1.1 %d " % status)
            assert b"connection: close" not in head.lower()
        for body, status in ((CHAT, 200), ({**CHAT, "n": 2}, 400)):
            request = raw_post("/v1/chat/completions", body, "Authorization: Bearer secret")
            await stream.send_all(request)
            head = await read_until(stream, b"}}")
            assert head.startswith(b"HTTP/1.1 %d " % status)
            assert b"connection: close" not in head.lower()
        await stream.send_all(raw_post("/v1/chat/completions", CHAT)[:-5])
        head = await read_until(stream, b"}}")
        assert head.startswith(b"HTTP/1.1 401 ")
        assert b"connection: close" in head.lower()


async def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "IDLE_TIMEOUT_S", 0.2)
    async with running() as gateway:
        fresh, half, used = [await connect(gateway.port) for _ in range(3)]
        await half.send_all(b"GET /version HTTP/1.1\r\nHos")
        await used.send_all(GET)
        for stream in (fresh, half, used):
            await read_all(stream, 2)
        await eventually(lambda: len(gateway.server._connections) == 0)


async def test_a_head_that_has_begun_has_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    async with running() as gateway:
        fresh, half, used, trickling = [await connect(gateway.port) for _ in range(4)]
        await half.send_all(b"GET /version HTTP/1.1\r\nHos")
        await used.send_all(GET)
        await read_until(used, b"}")

        async def trickle() -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                for letter in GET * 100:
                    await trickling.send_all(bytes([letter]))
                    await trio.sleep(0.02)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trickle)
            assert await read_all(half, 2) == b""
            assert await read_all(trickling, 2) == b""
            nursery.cancel_scope.cancel()
        for stream in (fresh, used):
            await stream.send_all(GET)
            await read_until(stream, b"}")
        await used.send_all(GET[:5])
        assert await read_all(used, 2) == b""


async def test_a_body_that_does_not_come_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "BODY_TIMEOUT_S", 0.2)
    monkeypatch.setattr(connection, "LINGER_S", 0.2)
    async with running() as gateway:
        stream = await connect(gateway.port)
        await stream.send_all(raw_post("/v1/chat/completions", CHAT)[:-5])
        received = await read_all(stream, 5)
        assert received.startswith(b"HTTP/1.1 408 ")
        assert b'"request_timeout"' in received


async def test_a_declared_body_too_large_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.5)
    async with running(max_body_bytes=1000) as gateway:
        stream = await connect(gateway.port)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n"
        await stream.send_all(head + b"x" * 100)
        received = await read_until(stream, b"}}")
        assert received.startswith(b"HTTP/1.1 413 ")
        assert b'"body_too_large"' in received
        for _ in range(5):  # whoever sends first and reads later must not be reset before it reads
            await stream.send_all(b"x" * 10_000)
            await trio.sleep(0.01)
        assert await read_all(stream, 5) == b""


async def test_a_chunked_body_too_large_is_refused_while_it_comes() -> None:
    async with running(max_body_bytes=100_000) as gateway:
        stream = await connect(gateway.port)
        await stream.send_all(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        num_sent = 0
        with trio.fail_after(10):
            try:
                while num_sent < 100_000_000:
                    await stream.send_all(b"10000\r\n" + b" " * 65536 + b"\r\n")
                    num_sent += 65536
            except trio.BrokenResourceError:
                pass
        assert num_sent < 100_000_000


async def test_a_client_that_goes_on_sending_still_sees_the_413() -> None:
    async with running(max_body_bytes=1000) as gateway:
        answer = await gateway.http.post("/v1/chat/completions", content=b" " * 3_000_000)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"


async def test_a_body_of_the_allowed_size_is_read() -> None:
    text = "x" * 900_000
    async with running(max_body_bytes=1_000_000) as gateway:
        answer = await gateway.post("/v1/completions", {"prompt": text})
        assert answer.status_code == 200
        assert len(gateway.client.asked[0].prompt.text) == 900_000  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"hello\r\n\r\n", b"400"),
        (b"GET /\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n" * 2, b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000, b"431"),
        (b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", b"501"),
        (b"GET /version HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", b"431"),
        (b"GET /version HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 6_000 + b"\r\n", b"431"),
        (b"GET /version?" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", b"414"),
        (b"GET /version?" + b"a" * 100_000, b"414"),
        (
            b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + GET,
            b"400",
        ),
        (b"POST /tokenize HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (b"GET /version HTTP/2.0\r\nHost: x\r\n\r\n" + GET, b"505"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"505"),
        (b"GET /version HTTP/0.9\r\n\r\n", b"505"),
        (
            b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
            b"400",
        ),
    ],
)
async def test_what_is_no_http_is_told_so(sent: bytes, status: bytes) -> None:
    async with running() as gateway:
        stream = await connect(gateway.port)
        await stream.send_all(sent)
        received = await read_all(stream)
        assert received.startswith(b"HTTP/1.1 " + status), received[:100]
        assert received.count(b"HTTP/1.1 ") == 1
        assert b"connection: close" in received.lower()
        assert b'{"error":' in received


async def test_the_answer_to_a_refused_head_request_has_no_body() -> None:
    async with running() as gateway:
        stream = await connect(gateway.port)
        await stream.send_all(b"HEAD /version HTTP/2.0\r\nHost: x\r\n\r\n")
        received = await read_all(stream)
        assert received.startswith(b"HTTP/1.1 505 ")
        assert received.endswith(b"\r\n\r\n")


async def test_heads_up_to_the_limit_are_read() -> None:
    async with running() as gateway:
        for head in (
            b"GET /version?" + b"a" * 32_000 + b" HTTP/1.1\r\nHost: x",
            b"GET /version HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 32_000,
            b"GET /version HTTP/1.9\r\nHost: x",
        ):
            stream = await connect(gateway.port)
            await stream.send_all(head + b"\r\n\r\n")
            assert (await read_until(stream, b"}")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET ?x=\xe4 HTTP/1.1", b"400"),
        (b"GET ?x HTTP/1.1", b"404"),
        (b"GET * HTTP/1.1", b"404"),
        (b"GET http://elsewhere/version HTTP/1.1", b"200"),
        (b"GET http://elsewhere HTTP/1.1", b"404"),
        (b"GET http://[ HTTP/1.1", b"404"),
        (b"GET /version?\xff HTTP/1.1", b"400"),
        (b"GET /version?%ff=%00 HTTP/1.1", b"200"),
        (b"GET /version HTTP/1.1\r\nUpgrade: h2c\r\nConnection: Upgrade\r\nHTTP2-Settings: x", b"200"),
        (
            b"GET /version HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13",
            b"200",
        ),
        (b"HEAD /version HTTP/1.1", b"200"),
        (b"BREW /version HTTP/1.1", b"405"),
    ],
)
async def test_odd_requests(head: bytes, status: bytes) -> None:
    async with running() as gateway:
        stream = await connect(gateway.port)
        await stream.send_all(head + b"\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = await read_all(stream)
        assert received.startswith(b"HTTP/1.1 " + status), received[:200]


def raw_stream() -> bytes:
    return raw_post("/v1/chat/completions", STREAM)


async def test_more_connections_than_allowed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "max_connections", lambda _settings: 3)
    async with running(endless()) as gateway:
        busy = [await connect(gateway.port) for _ in range(3)]
        for stream in busy:
            await stream.send_all(raw_stream())
            await read_until(stream, b'"x')
        extra = await connect(gateway.port)
        assert (await read_all(extra)).startswith(b"HTTP/1.1 503 ")
        await busy[0].aclose()
        await eventually(lambda: len(gateway.server._connections) == 2)
        assert (await gateway.http.get("/version")).status_code == 200


async def test_idle_connections_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlimited connections that say nothing, or half of something, keep nobody out."""
    monkeypatch.setattr(server_module, "max_connections", lambda _settings: 4)
    async with running(endless()) as gateway:
        busy = await connect(gateway.port)
        await busy.send_all(raw_stream())
        await read_until(busy, b'"x')
        kept = await connect(gateway.port)
        await kept.send_all(GET)
        await read_until(kept, b"}")
        silent = [await connect(gateway.port) for _ in range(2)]
        await silent[0].send_all(GET[:20])
        await eventually(lambda: len(gateway.server._connections) == 4)
        fresh = await connect(gateway.port)
        await fresh.send_all(GET)
        assert (await read_until(fresh, b"}")).startswith(b"HTTP/1.1 200 ")
        assert await read_all(kept) == b""  # idle for longer than the silent ones
        for _ in range(20):
            silent.append(await connect(gateway.port))
            await silent[-1].send_all(GET[:20])
        for stream in silent[:3]:
            assert await read_all(stream) == b""
        stream = await connect(gateway.port)
        await stream.send_all(GET.replace(b"version", b"health"))
        assert (await read_until(stream, b"}")).startswith(b"HTTP/1.1 200 ")
        await read_until(busy, b'"x')
        assert gateway.client.aborted == []
        assert len(gateway.server._connections) == 4


async def test_bodies_that_do_not_come_make_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "max_connections", lambda _settings: 2)
    async with running() as gateway:
        slow = [await connect(gateway.port) for _ in range(2)]
        for stream in slow:
            await stream.send_all(raw_post("/v1/chat/completions", CHAT)[:-5])
        await eventually(lambda: all(one.awaits_body for one in gateway.server._connections))
        early = await connect(gateway.port)
        assert (await read_all(early)).startswith(b"HTTP/1.1 503 ")
        monkeypatch.setattr(server_module, "BODY_GRACE_S", 0.0)
        stream = await connect(gateway.port)
        await stream.send_all(GET)
        assert (await read_until(stream, b"}")).startswith(b"HTTP/1.1 200 ")
        with pytest.raises(trio.BrokenResourceError):
            await read_all(slow[0])
        await slow[1].send_all(raw_post("/v1/chat/completions", CHAT)[-5:])
        assert (await read_until(slow[1], b"}}}")).startswith(b"HTTP/1.1 200 ")
