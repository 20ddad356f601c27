"""Clients that say they send nothing more, and still read: they are answered. Those that left are noticed."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import trio

from ksana.gateway import connection
from ksana.gateway.begun import Begun
from tests.gateway.fake_client import endless, says, silent
from tests.gateway.serving import CHAT, connect, eventually, raw_post, read_all, read_until, running, sse_data

STREAM = {**CHAT, "stream": True}
SLOW = says("a", "b", "c", pause_s=0.08)
GET = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"


def parts(answer: bytes) -> tuple[bytes, bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


def dechunked(body: bytes) -> bytes:
    whole = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            assert body == b"\r\n"
            return whole
        whole, body = whole + body[:length], body[length + 2 :]


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("headers", [[], ["Connection: close"], ["Connection: keep-alive"]])
async def test_a_request_is_answered_whole(version: str, headers: list[str]) -> None:
    async with running(SLOW) as gateway:
        stream = await connect(gateway.port)
        await stream.send_all(raw_post("/v1/chat/completions", CHAT, *headers, version=version))
        await stream.send_eof()
        head, body = parts(await read_all(stream))
        assert head.startswith(b"HTTP/1.1 200 ")
        assert head.count(b"HTTP/1.1") == 1
        assert msgspec.json.decode(body)["choices"][0]["message"]["content"] == "abc"
        assert gateway.client.aborted == []
        await eventually(lambda: len(gateway.server._connections) == 0)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", STREAM), ("/generate", {"prompt": "a", "stream": True})]
)
async def test_a_stream_is_streamed_whole(path: str, body: Any, version: str) -> None:
    async with running(SLOW) as gateway:
        stream = await connect(gateway.port)
        await stream.send_all(raw_post(path, body, version=version))
        await stream.send_eof()
        head, sent = parts(await read_all(stream))
        assert head.startswith(b"HTTP/1.1 200 ")
        if version == "1.1":
            sent = dechunked(sent)
        if path == "/generate":
            assert msgspec.json.decode(sent.split(b"\0")[-2])["texts"] == ["abc"]
        else:
            events = sse_data(sent.decode())
            assert events[-1] == "[DONE]"
            assert [one["choices"][0]["delta"].get("content") for one in events[1:4]] == ["a", "b", "c"]
        assert gateway.client.aborted == []


async def test_ending_in_the_middle_of_a_stream_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PROBE_EVERY_S", 0.01)
    async with running(says("a", "b", "c", pause_s=0.3)) as gateway:
        stream = await connect(gateway.port)
        await stream.send_all(raw_post("/v1/chat/completions", STREAM))
        received = await read_until(stream, b'"a"')
        await stream.send_eof()
        received += await read_all(stream)
        events = sse_data(dechunked(parts(received)[1]).decode())
        assert [one["choices"][0]["delta"].get("content") for one in events[1:4]] == ["a", "b", "c"]
        assert b"\r\n00" in received, "the stream was never written to while it was silent"


async def test_requests_sent_before_the_end_are_all_answered() -> None:
    async with running(SLOW) as gateway:
        stream = await connect(gateway.port)
        await stream.send_all(
            raw_post("/v1/chat/completions", CHAT) + raw_post("/v1/chat/completions", STREAM) + GET
        )
        await stream.send_eof()
        received = await read_all(stream)
        assert received.count(b"HTTP/1.1 200 ") == 3
        assert received.count(b"[DONE]") == 1
        assert b'"version"' in received
        assert gateway.client.aborted == []


async def test_an_answer_may_take_longer_than_there_are_bytes_to_ask_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "PROBE_EVERY_S", 0.0)
    async with running(says("a", pause_s=1.0)) as gateway:
        stream = await connect(gateway.port)
        await stream.send_all(raw_post("/v1/chat/completions", CHAT))
        await stream.send_eof()
        begun = await read_until(stream, Begun.LINE, 0.9)
        assert begun == Begun.LINE
        assert parts(begun + await read_all(stream))[0].startswith(b"HTTP/1.1 200 ")


async def test_an_error_is_told_too() -> None:
    async with running(api_key="secret") as gateway:
        for sent, status in (
            (raw_post("/v1/chat/completions", CHAT), b"401"),
            (raw_post("/v1/chat/completions", {**CHAT, "n": 2}, "Authorization: Bearer secret"), b"400"),
            (b"GET /nothing HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n\r\n", b"404"),
        ):
            stream = await connect(gateway.port)
            await stream.send_all(sent)
            await stream.send_eof()
            received = await read_all(stream)
            assert received.startswith(b"HTTP/1.1 " + status)
            assert b'{"error":' in received


CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        raw_post("/v1/chat/completions", CHAT)[:-5],
        raw_post("/v1/chat/completions", CHAT).partition(b"\r\n\r\n")[0] + b"\r\n\r\n",
        CHUNKED,
        CHUNKED + b"5",
        CHUNKED + b"5\r\nab",
        CHUNKED + b"5\r\nabcde",
        CHUNKED + b"2\r\n{}\r\n",
        CHUNKED + b"2\r\n{}\r\n0\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Le",
        b"GET /version HTTP/1.1\r\n",
        b"GET",
    ],
)
async def test_what_ends_before_it_is_whole_is_a_400(sent: bytes, caplog: Any) -> None:
    caplog.set_level("INFO", "ksana.gateway")
    async with running() as gateway:
        stream = await connect(gateway.port)
        await stream.send_all(sent)
        await stream.send_eof()
        received = await read_all(stream)
        assert received.startswith(b"HTTP/1.1 400 ")
        assert received.count(b"HTTP/1.1 ") == 1
        assert b"stopped sending before its request was whole" in received
        assert b"connection: close" in received.lower()
        await eventually(lambda: len(gateway.server._connections) == 0)
    lines = [one for one in caplog.messages if " 400" in one]
    assert len(lines) == len([one for one in caplog.messages if "version" not in one or one in lines]) == 1
    assert "before its request was whole" in lines[0]


def close(stream: trio.SocketStream) -> None:
    stream.socket.close()


def reset(stream: trio.SocketStream) -> None:
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    stream.socket.close()


@pytest.mark.parametrize("leave", [close, reset])
@pytest.mark.parametrize("script", [endless(), silent], ids=["talking", "silent"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", STREAM),
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/generate", {"prompt": "a"}),
    ],
)
@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_client_that_ends_and_leaves_later_is_noticed(
    path: str,
    body: Any,
    script: Any,
    leave: Callable[[trio.SocketStream], None],
    version: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "PROBE_EVERY_S", 0.2)
    num_prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    async with running(script) as gateway:
        stream = await connect(gateway.port)
        await stream.send_all(raw_post(path, body, version=version))
        await stream.send_eof()
        await eventually(lambda: len(gateway.client.asked) == num_prompts)
        await trio.sleep(0.1)
        assert gateway.client.aborted == []
        leave(stream)
        await eventually(lambda: len(gateway.client.aborted) == num_prompts, 2)
        await eventually(lambda: len(gateway.server._connections) == 0)


async def test_a_client_that_leaves_while_its_stream_is_silent_is_noticed() -> None:
    async def script(asked: Any) -> Any:
        async for event in says("a")(asked):
            yield event
            if event.__class__.__name__ == "TextDelta":
                await trio.sleep_forever()

    async with running(script) as gateway:
        for path, body in (("/v1/chat/completions", STREAM), ("/generate", {"prompt": "a"})):
            stream = await connect(gateway.port)
            await stream.send_all(raw_post(path, body))
            await read_until(stream, b'"a"')
            before = len(gateway.client.aborted)
            close(stream)
            await eventually(lambda before=before: len(gateway.client.aborted) == before + 1, 0.5)


async def test_a_crowd_that_ends_and_stays_holds_up_no_stop() -> None:
    async with running(silent) as gateway:
        streams = [await connect(gateway.port) for _ in range(50)]
        for stream in streams:
            await stream.send_all(raw_post("/v1/chat/completions", CHAT))
            await stream.send_eof()
        await eventually(lambda: len(gateway.client.asked) == 50)
        with trio.fail_after(6):
            gateway.server.stop.set()
            await gateway.server.stopped.wait()
        for stream in streams:
            with contextlib.suppress(trio.BrokenResourceError):
                assert (await read_all(stream)).startswith(b"HTTP/1.1 503 ")


async def test_ending_without_a_request_is_closing() -> None:
    async with running() as gateway:
        fresh, used = await connect(gateway.port), await connect(gateway.port)
        await used.send_all(GET)
        await read_until(used, b"}")
        for stream in (fresh, used):
            await stream.send_eof()
            assert await read_all(stream) == b""
        await eventually(lambda: len(gateway.server._connections) == 0)
