"""Hundreds of clients at once, many of them rude: everything ends, nothing is kept, the server goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.models_for_tests import tiny_gemma3_dir
from tests.processes import PATIENCE_S, eventually
from tests.server.conftest import Serve
from tests.server.process import ServerProcess, post

GREEDY = {"temperature": 0, "ignore_eos": True}


def completion(server: ServerProcess, prompt: str, max_tokens: int, **more: Any) -> str:
    with server.http() as http:
        body = {"prompt": prompt, "max_tokens": max_tokens, **GREEDY, **more}
        answer = http.post("/v1/completions", json=body)
        text: str = answer.raise_for_status().json()["choices"][0]["text"]
        return text


class Crowd:
    """500 requests, each decided by its number: what it asks, whether it streams, when it leaves."""

    def __init__(self, server: ServerProcess) -> None:
        self._url = server.url
        self._port = server.port
        self._limit = trio.CapacityLimiter(200)
        self.endings: Counter[str] = Counter()
        self.said: dict[str, set[str]] = {}
        """What was answered to each greedy completion, by the request: of those to one request, all."""

    async def run(self, num_requests: int) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
        async with (
            httpx.AsyncClient(
                base_url=self._url, limits=limits, timeout=PATIENCE_S, trust_env=False
            ) as self._http,
            trio.open_nursery() as nursery,
        ):
            for number in range(num_requests):
                nursery.start_soon(self._one, random.Random(number))

    async def _one(self, rng: random.Random) -> None:
        async with self._limit:
            path, body = self._request(rng)
            leaves_after_s = rng.choice([None, None, None, 0.0, rng.random() / 2, rng.random() * 4])
            if leaves_after_s is not None and rng.random() < 0.5:
                ending = await self._on_a_bare_socket(post(path, body), leaves_after_s, rng)
            elif body["stream"]:
                ending = await self._streaming(path, body, leaves_after_s)
            else:
                ending = await self._not_streaming(path, body, leaves_after_s)
            self.endings[ending] += 1

    def _request(self, rng: random.Random) -> tuple[str, dict[str, Any]]:
        text = rng.choice(["the king ", "rain and ", "numbers: "]) * rng.choice([1, 3, 10, 30, 60])
        max_tokens = rng.choice([1, 2, 8, 30, 30, 100])
        stream = rng.random() < 0.5
        sampling = {"temperature": rng.choice([0, 1]), "seed": rng.randrange(100)}
        match rng.randrange(4):
            case 0:
                messages = [{"role": "user", "content": text}]
                body = {"messages": messages, "max_tokens": max_tokens, "stream": stream, **sampling}
                return "/v1/chat/completions", body
            case 1:
                config = {"max_new_tokens": max_tokens, "topk": rng.choice([1, 5]), "ignore_eos": True}
                return "/generate", {"prompt": text, "sampling_config": config, "stream": stream}
            case 2:
                prompts = [text, text[::-1], text[3:]]
                return "/v1/completions", {"prompt": prompts, "max_tokens": max_tokens, "stream": stream}
            case _:
                body = {"prompt": text, "max_tokens": max_tokens, "stream": stream, **sampling}
                return "/v1/completions", {**body, "ignore_eos": True}

    async def _streaming(self, path: str, body: dict[str, Any], leaves_after_s: float | None) -> str:
        received = b""
        with trio.move_on_after(PATIENCE_S if leaves_after_s is None else leaves_after_s):
            async with self._http.stream("POST", path, json=body) as answer:
                async for piece in answer.aiter_bytes():
                    received += piece
            if answer.status_code != 200:
                return f"refused with {answer.status_code}"
            ends = b"\0" if path == "/generate" else b"data: [DONE]\n\n"
            assert received.endswith(ends), received[-300:]
            assert b'"error"' not in received
            if path == "/v1/completions":
                events = [one.removeprefix("data: ") for one in received.decode().split("\n\n")[:-2]]
                self._note(body, [choice for event in events for choice in json.loads(event)["choices"]])
            return "streamed"
        assert leaves_after_s is not None, f"no end of a stream: {received[-300:]!r}"
        return "left"

    async def _not_streaming(self, path: str, body: dict[str, Any], leaves_after_s: float | None) -> str:
        with trio.move_on_after(PATIENCE_S if leaves_after_s is None else leaves_after_s):
            answer = await self._http.post(path, json=body)
            if answer.status_code != 200:
                return f"refused with {answer.status_code}"
            if path == "/v1/completions":
                self._note(body, answer.json()["choices"])
            return "answered"
        assert leaves_after_s is not None, "no answer"
        return "left"

    def _note(self, body: dict[str, Any], choices: list[dict[str, Any]]) -> None:
        if body.get("temperature") == 0:
            asked = f"{body['prompt']} {body['max_tokens']}"
            self.said.setdefault(asked, set()).add("".join(choice["text"] for choice in choices))

    async def _on_a_bare_socket(self, request: bytes, leaves_after_s: float, rng: random.Random) -> str:
        """Leaves in the ways that libraries do not: in the middle of the request, or with a reset."""
        stream = await trio.open_tcp_stream("127.0.0.1", self._port)
        async with stream:
            cut = len(request) if rng.random() < 0.7 else rng.randrange(len(request))
            await stream.send_all(request[:cut])
            with trio.move_on_after(leaves_after_s):
                while await stream.receive_some(rng.choice([10, 4096])):
                    pass
            if rng.random() < 0.5:
                stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return "left"


async def test_500_requests_of_which_many_leave(server: ServerProcess) -> None:
    await survives_500_requests(server)


@pytest.mark.slow
async def test_500_requests_with_sliding_windows(serve: Serve, tmp_path: Path) -> None:
    """And with steps that are not planned ahead, in blocks of another size."""
    model = str(tiny_gemma3_dir(tmp_path))
    flags = ("--kv-cache-memory", "1MiB", "--max-model-len", "1024", "--block-size", "8")
    await survives_500_requests(serve(*flags, "--max-num-batched-tokens", "100", model=model))
    await survives_500_requests(serve(*flags, "--no-plan-ahead", "--swa-eviction", "lru", model=model))


@pytest.mark.slow
async def test_500_requests_while_workers_die(serve: Serve) -> None:
    """Killed twice and frozen once: nobody who stays hears anything but the whole right answer."""
    server = serve("--stall-timeout", "5")
    await trio.to_thread.run_sync(lambda: server.url)

    def hurt() -> None:
        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
            before = server.metrics()
            eventually(lambda: server.metrics()["steps_total"] > before["steps_total"] + 50)  # noqa: B023
            os.kill(server.the_worker(), number)
            restarts = before["worker_restarts_total"]
            eventually(lambda: server.metrics()["worker_restarts_total"] > restarts)  # noqa: B023

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, hurt)
        crowd = Crowd(server)
        with trio.fail_after(4 * PATIENCE_S):
            await crowd.run(500)
    assert set(crowd.endings) <= {"streamed", "answered", "left", "refused with 429"}
    assert all(len(texts) == 1 for texts in crowd.said.values())
    undisturbed = Crowd(server)
    with trio.fail_after(4 * PATIENCE_S):
        await undisturbed.run(500)
    both = crowd.said.keys() & undisturbed.said.keys()
    assert len(both) > 10
    assert all(crowd.said[asked] == undisturbed.said[asked] for asked in both)
    after = await trio.to_thread.run_sync(server.wait_until_idle)
    assert after["worker_restarts_total"] >= 3
    assert after["core_crashes_total"] == 0
    assert "Traceback" not in server.log


async def survives_500_requests(server: ServerProcess) -> None:
    before = await trio.to_thread.run_sync(completion, server, "the king", 30)
    crowd = Crowd(server)
    with trio.fail_after(4 * PATIENCE_S):
        await crowd.run(500)
    assert set(crowd.endings) <= {"streamed", "answered", "left", "refused with 429"}
    assert crowd.endings["streamed"] > 50
    assert crowd.endings["answered"] > 50
    assert crowd.endings["left"] > 50
    # Whoever asked the same greedily was told the same, streaming or not, whatever else ran beside.
    assert len(crowd.said) > 10
    assert all(len(texts) == 1 for texts in crowd.said.values())
    after = await trio.to_thread.run_sync(server.wait_until_idle)
    assert after["num_preemptions_total"] > 0, "the pool was never full, so it should be smaller"
    assert after["core_crashes_total"] == 0
    assert after["worker_restarts_total"] == 0
    assert await trio.to_thread.run_sync(completion, server, "the king", 30) == before
    assert "Traceback" not in server.log
    assert "ERROR" not in server.log


async def test_300_streams_opened_and_closed_at_once(server: ServerProcess) -> None:
    before = await trio.to_thread.run_sync(completion, server, "rain", 30)
    request = post("/v1/completions", {"prompt": "rain", "max_tokens": 1500, "stream": True, **GREEDY})
    opened: list[trio.SocketStream] = []

    async def open_one() -> None:
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        opened.append(stream)
        await stream.send_all(request)

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for _ in range(300):
                nursery.start_soon(open_one)
        # All are somewhere inside before they leave.
        await trio.to_thread.run_sync(
            eventually, lambda: server.metrics()["num_open_slots"] == 300, PATIENCE_S
        )
        for stream in opened:
            await trio.aclose_forcefully(stream)
    after = await trio.to_thread.run_sync(server.wait_until_idle)
    assert after["core_crashes_total"] == 0
    assert await trio.to_thread.run_sync(completion, server, "rain", 30) == before
    assert "Traceback" not in server.log


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_is_forgotten_at_once(server: ServerProcess, stream: bool) -> None:
    """Long before the end: the request would go on for 2,000 tokens, and steps are counted."""
    server.wait_until_idle()
    body = {"prompt": "a", "max_tokens": 2000, "stream": stream, **GREEDY}
    before = server.metrics()["steps_total"]
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(post("/v1/completions", body))
        eventually(lambda: server.metrics()["steps_total"] > before + 5)
        assert server.metrics()["num_requests_running"] == 1
    assert server.wait_until_idle()["steps_total"] - before < 1500


def test_a_slow_reader_harms_only_itself(server: ServerProcess) -> None:
    before = completion(server, "slow", 20)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", server.port))
        config = {"max_new_tokens": 1500, "ignore_eos": True}
        # Records are cumulative: megabytes, of which nothing is read.
        client.sendall(post("/generate", {"prompt": "b", "sampling_config": config, "stream": True}))
        eventually(lambda: server.metrics()["num_open_slots"] == 1)
        assert completion(server, "slow", 20) == before
        # It is generated to its end without the reader: what he did not take was joined.
        eventually(lambda: server.metrics()["num_requests_running"] == 0)
    server.wait_until_idle()
