"""A gateway on a real socket, and clients for it that can misbehave."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import trio

from ksana.config import Settings
from ksana.gateway.app import create_app, create_gateway
from ksana.gateway.context import Gateway
from ksana.gateway.server import Server
from tests.gateway.fake_client import FakeClient, Script


@dataclass
class Running:
    """`http` is a well-behaved client; `port` is for the others."""

    client: FakeClient
    gateway: Gateway
    server: Server
    port: int
    http: httpx.AsyncClient

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.http.post(path, json=body, headers=headers)


@asynccontextmanager
async def running(
    script: Script | None = None, capacity: int = 1000, **settings: Any
) -> AsyncIterator[Running]:
    """Serve a fake engine on a free port for the length of the block, then stop, which must not take long."""
    made = Settings(model="x", port=0, **{"drain_timeout": 0, **settings})
    async with trio.open_nursery() as nursery:
        client = FakeClient(nursery, capacity=capacity)
        if script is not None:
            client.script = script
        gateway = create_gateway(client, made)
        server = Server(create_app(gateway), made, gateway.traffic)
        addresses = await nursery.start(server.serve)
        port = addresses[0][1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
            try:
                yield Running(client, gateway, server, port, http)
            finally:
                with trio.CancelScope(shield=True), trio.fail_after(10):
                    server.stop.set()
                    await server.stopped.wait()
        nursery.cancel_scope.cancel()


async def eventually(condition: Any, timeout_s: float = 5.0) -> None:
    """Wait until `condition()` holds."""
    with trio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.005)


def raw_post(path: str, body: Any, *headers: str, version: str = "1.1") -> bytes:
    """The bytes of a POST request."""
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    lines = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


async def connect(port: int) -> trio.SocketStream:
    return await trio.open_tcp_stream("127.0.0.1", port)


async def read_all(stream: trio.SocketStream, timeout_s: float = 5.0) -> bytes:
    """Everything until the server closes; fails if it does not."""
    received = b""
    with trio.fail_after(timeout_s):
        while data := await stream.receive_some(65536):
            received += data
    return received


async def read_until(stream: trio.SocketStream, mark: bytes, timeout_s: float = 5.0) -> bytes:
    received = b""
    with trio.fail_after(timeout_s):
        while mark not in received:
            data = await stream.receive_some(65536)
            assert data, f"closed before {mark!r}: {received[-300:]!r}"
            received += data
    return received


def sse_data(text: str) -> list[Any]:
    """The events of an SSE body: decoded JSON, or the bare text of `[DONE]`."""
    assert text.endswith("\n\n")
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        assert block.startswith("data: "), block
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else msgspec.json.decode(data))
    return events


CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "fake", "prompt": "Hi"}
