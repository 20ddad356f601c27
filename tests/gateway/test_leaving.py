"""Clients that leave, stop reading, or come in crowds; servers that stop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import trio

from ksana.gateway import answer as answers
from ksana.gateway import asgi, connection, server
from ksana.gateway.app import create_app
from ksana.messages.outputs import OutputEvent
from ksana.messages.requests import Generate
from tests.gateway.fake_client import endless, says, silent
from tests.gateway.serving import CHAT, connect, eventually, raw_post, read_all, read_until, running

STREAM = {**CHAT, "stream": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", STREAM),
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": ["a", "b", "c"], "stream": True}),
        ("/v1/completions", {"prompt": ["a", "b", "c"]}),
        ("/generate", {"prompt": "a"}),
        ("/generate", {"prompt": "a", "stream": False}),
    ],
)
@pytest.mark.parametrize("script", [endless(), silent], ids=["talking", "silent"])
async def test_a_client_that_closes_frees_its_requests(path: str, body: Any, script: Any) -> None:
    num_prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    async with running(script) as gateway:
        stream = await connect(gateway.port)
        await stream.send_all(raw_post(path, body))
        await eventually(lambda: len(gateway.client.asked) == num_prompts)
        await trio.sleep(0.02)
        assert gateway.client.aborted == []
        await stream.aclose()
        await eventually(lambda: len(gateway.client.aborted) == num_prompts, 0.5)
        await eventually(lambda: len(gateway.gateway.traffic) == 0)


async def test_leaving_is_noticed_behind_pipelined_bytes() -> None:
    async with running(silent) as gateway:
        stream = await connect(gateway.port)
        await stream.send_all(
            raw_post("/v1/chat/completions", CHAT) + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        )
        await eventually(lambda: len(gateway.client.asked) == 1)
        await trio.sleep(0.02)
        assert gateway.client.aborted == []
        await stream.aclose()
        await eventually(lambda: gateway.client.aborted == [1], 0.5)


async def test_a_reset_is_leaving_too() -> None:
    async with running(silent) as gateway:
        stream = await connect(gateway.port)
        await stream.send_all(raw_post("/v1/chat/completions", CHAT))
        await eventually(lambda: len(gateway.client.asked) == 1)
        stream.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        await stream.aclose()
        await eventually(lambda: gateway.client.aborted == [1], 0.5)


async def test_leaving_while_the_connection_is_made_ready_for_a_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not wait for one until it has been idle for too long."""
    make_idle = connection.Connection._become_idle

    async def late(self: connection.Connection) -> None:
        while self.idle_since_s is None and not self._is_over:  # noqa: ASYNC110
            await trio.sleep(0.005)
        await make_idle(self)

    monkeypatch.setattr(connection.Connection, "_become_idle", late)
    async with running(says("a")) as gateway:
        stream = await connect(gateway.port)
        await stream.send_all(raw_post("/v1/chat/completions", CHAT))
        await read_until(stream, b"}}}")
        stream.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        await stream.aclose()
        await eventually(lambda: len(gateway.server._connections) == 0, 3)


async def test_leaving_between_the_first_output_and_the_first_byte() -> None:
    """The stream is made, but nobody ever iterates over it."""
    async with running(endless()) as gateway:
        app = create_app(gateway.gateway)
        left = trio.Event()

        async def send(message: Any) -> None:
            assert message["type"] == "http.response.start"
            left.set()
            await trio.sleep_forever()

        requests = [{"type": "http.request", "body": msgspec.json.encode(STREAM), "more_body": False}]

        async def receive() -> Any:
            if requests:
                return requests.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": [(b"host", b"x")],
        }
        with trio.fail_after(2):
            await app(scope, receive, send)  # type: ignore[arg-type]
        assert gateway.client.aborted == [1]
        assert len(gateway.gateway.traffic) == 0


async def test_a_finished_request_is_not_aborted() -> None:
    async with running(says("a")) as gateway:
        for streaming in (False, True):
            await gateway.post("/v1/chat/completions", {**CHAT, "stream": streaming})
        assert gateway.client.aborted == []


async def test_hundreds_of_streams_opened_and_closed_at_once() -> None:
    async with running(endless(pause_s=0.05)) as gateway:

        async def come_and_go() -> None:
            stream = await connect(gateway.port)
            await stream.send_all(raw_post("/v1/chat/completions", STREAM))
            await stream.receive_some(100)
            await trio.sleep(0.1)
            await stream.aclose()

        async with trio.open_nursery() as nursery:
            for _ in range(300):
                nursery.start_soon(come_and_go)
        await eventually(lambda: len(gateway.client.aborted) == 300, 10)
        await eventually(lambda: len(gateway.gateway.traffic) == 0)
        gateway.client.script = says("still here")
        answer = await gateway.post("/v1/chat/completions", CHAT)
        assert answer.json()["choices"][0]["message"]["content"] == "still here"


async def test_connections_closed_before_they_asked_anything() -> None:
    async with running() as gateway:
        for number in range(50):
            stream = await connect(gateway.port)
            if number % 2:
                await stream.send_all(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Le")
            await stream.aclose()
        await eventually(lambda: len(gateway.server._connections) <= 1)
        assert (await gateway.post("/v1/chat/completions", CHAT)).status_code == 200


async def test_a_client_that_stops_reading_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SEND_TIMEOUT_S", 0.3)
    async with running(endless("x" * 100_000)) as gateway:
        stream = await connect(gateway.port)
        await stream.send_all(raw_post("/v1/chat/completions", STREAM))
        await read_until(stream, b"xxx")
        await eventually(lambda: gateway.client.aborted == [1], 3)
        await eventually(lambda: len(gateway.server._connections) == 0)
        await stream.aclose()


async def test_a_server_stops_in_spite_of_clients_that_do_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CLOSE_GRACE_S", 0.3)
    async with running(endless("x" * 100_000)) as gateway:
        streams = [await connect(gateway.port) for _ in range(3)]
        for stream in streams:
            await stream.send_all(raw_post("/v1/chat/completions", STREAM))
            await read_until(stream, b"xxx")
        await trio.sleep(0.3)
        with trio.fail_after(2):
            gateway.server.stop.set()
            await gateway.server.stopped.wait()
        assert len(gateway.client.aborted) == 3
        for stream in streams:
            await stream.aclose()


async def test_a_stop_lets_running_streams_end_and_refuses_new_ones() -> None:
    async with running(says(*"abcde", pause_s=0.1), drain_timeout=20) as gateway:
        stream = await connect(gateway.port)
        await stream.send_all(raw_post("/v1/chat/completions", STREAM))
        await read_until(stream, b'"a"')
        gateway.server.stop.set()
        await eventually(lambda: gateway.gateway.traffic.draining)
        answer = await gateway.post("/v1/chat/completions", CHAT)
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
        assert (await gateway.http.get("/ready")).status_code == 503
        rest = await read_all(stream)
        assert b'"e"' in rest
        assert b"[DONE]" in rest
        with trio.fail_after(3):
            await gateway.server.stopped.wait()
        with pytest.raises(OSError, match="connect"):
            await connect(gateway.port)


@pytest.mark.parametrize("script", [endless(pause_s=0.01), silent], ids=["talking", "silent"])
async def test_after_the_drain_timeout_streams_end_with_an_error(script: Any) -> None:
    async with running(script, drain_timeout=1) as gateway:
        stream, whole = await connect(gateway.port), await connect(gateway.port)
        await stream.send_all(raw_post("/v1/chat/completions", STREAM))
        await whole.send_all(raw_post("/v1/chat/completions", CHAT))
        await eventually(lambda: len(gateway.client.asked) == 2)
        await trio.sleep(0.1)
        gateway.server.stop.set()
        received = await read_all(stream)
        assert b"shutting_down" in received
        assert b"[DONE]" not in received
        assert b'"finish_reason":"' not in received
        assert (await read_all(whole)).startswith(b"HTTP/1.1 503 ")
        with trio.fail_after(5):
            await gateway.server.stopped.wait()
        assert sorted(gateway.client.aborted) == [1, 2]


async def test_hurry_does_not_wait_for_the_drain_timeout() -> None:
    async with running(endless(), drain_timeout=1000) as gateway:
        stream = await connect(gateway.port)
        await stream.send_all(raw_post("/v1/chat/completions", STREAM))
        await read_until(stream, b'"x')
        gateway.server.stop.set()
        await eventually(lambda: gateway.gateway.traffic.draining)
        await trio.sleep(0.1)
        assert gateway.client.aborted == []
        gateway.server.hurry.set()
        assert b"shutting_down" in await read_all(stream)
        with trio.fail_after(5):
            await gateway.server.stopped.wait()


async def test_a_silent_stream_is_pinged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "PING_INTERVAL_S", 0.05)

    async def script(asked: Generate) -> AsyncIterator[OutputEvent]:
        async for event in says("first")(asked):
            yield event
            if event.__class__.__name__ == "TextDelta":
                await trio.sleep(0.3)

    async with running(script) as gateway:
        answer = await gateway.post("/v1/chat/completions", STREAM)
        assert 2 <= answer.text.count(": ping\n\n") <= 8
        assert answer.text.endswith("data: [DONE]\n\n")
        assert (await gateway.post("/generate", {"prompt": "a"})).text.count("ping") == 0


async def test_an_engine_that_never_ends_a_request_is_a_504(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "ENGINE_GRACE_S", -0.8)
    async with running(silent, request_timeout=1) as gateway:
        for streaming in (False, True):
            answer = await gateway.post("/v1/chat/completions", {**CHAT, "stream": streaming})
            assert answer.status_code == 504
        assert gateway.client.aborted == [1, 2]
