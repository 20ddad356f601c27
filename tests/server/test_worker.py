"""What happens to the worker process: killed, frozen, orphaned. Clients see nothing of the first two."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.models_for_tests import smollm2_gguf
from tests.processes import eventually, is_running
from tests.server.conftest import TINY_FLAGS, Serve
from tests.server.process import ServerProcess

STALL_S = 5


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(str(tiny_model), *TINY_FLAGS, "--stall-timeout", str(STALL_S))
    yield process
    process.kill()


def stream_text(http: httpx.Client, body: dict[str, Any], on_line: Callable[[int], None]) -> str:
    """The text of a streamed completion; `on_line` is told how many pieces have come."""
    text, num_pieces, lines = "", 0, []
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                lines.append(line)
                continue
            piece = httpx.Response(200, content=line.removeprefix("data: ")).json()
            assert "error" not in piece, piece
            text += piece["choices"][0]["text"]
            num_pieces += 1
            on_line(num_pieces)
    assert [line for line in lines if line] == ["data: [DONE]"]
    return text


def four_answers(server: ServerProcess, prompts: list[str], max_tokens: int, at: int = 0) -> list[str]:
    """Three streams and one answer that does not stream, at the same time.

    With `at`, the worker is killed when the first stream has had that many pieces.
    """
    killed = threading.Event()

    def on_line(num_pieces: int) -> None:
        if at and num_pieces >= at and not killed.is_set():
            killed.set()
            os.kill(server.the_worker(), signal.SIGKILL)

    def body(prompt: str) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}

    def whole(http: httpx.Client) -> str:
        answer = http.post("/v1/completions", json=body(prompts[3]))
        text: str = answer.raise_for_status().json()["choices"][0]["text"]
        return text

    with server.http() as http, ThreadPoolExecutor(4) as pool:
        asked: list[Future[str]] = [
            pool.submit(stream_text, http, body(prompts[0]), on_line),
            *(pool.submit(stream_text, http, body(prompt), lambda _number: None) for prompt in prompts[1:3]),
            pool.submit(whole, http),
        ]
        texts = [one.result() for one in asked]
    assert killed.is_set() == bool(at)
    return texts


def test_killed_in_mid_stream(server: ServerProcess) -> None:
    prompts = ["the king", "rain " * 30, "numbers", "an end"]
    undisturbed = four_answers(server, prompts, 150)
    before = server.wait_until_idle()
    assert before["worker_restarts_total"] == 0
    worker = server.the_worker()
    assert four_answers(server, prompts, 150, at=20) == undisturbed
    after = server.wait_until_idle()
    assert after["worker_restarts_total"] == 1
    assert server.the_worker() != worker
    assert "killed by SIGKILL" in server.log
    with server.http() as http:
        assert http.get("/health").status_code == 200
        assert http.get("/ready").status_code == 200


def test_killed_with_nothing_to_do(server: ServerProcess) -> None:
    worker = server.the_worker()
    restarts = server.wait_until_idle()["worker_restarts_total"]
    os.kill(worker, signal.SIGKILL)
    eventually(lambda: server.metrics()["worker_restarts_total"] == restarts + 1)
    with server.http() as http:
        body = {"prompt": "a", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        assert http.post("/v1/completions", json=body).status_code == 200
        assert http.get("/ready").status_code == 200


def test_frozen_in_mid_stream(server: ServerProcess) -> None:
    """/health tells of it after the stall timeout, the worker is replaced, and the stream goes on."""
    body = {"prompt": "the king", "max_tokens": 150, "temperature": 0, "ignore_eos": True}
    seen_unhealthy: list[str] = []
    frozen: list[int] = []
    with server.http() as http, server.http() as probe:
        undisturbed = stream_text(http, body, lambda _number: None)
        restarts = server.wait_until_idle()["worker_restarts_total"]
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.1):
                answer = probe.get("/health")
                if answer.status_code == 503:
                    seen_unhealthy.append(answer.json()["error"]["message"])

        def on_line(num_pieces: int) -> None:
            if num_pieces >= 20 and not frozen:
                frozen.append(server.the_worker())
                os.kill(frozen[0], signal.SIGSTOP)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            assert stream_text(http, body, on_line) == undisturbed
        finally:
            over.set()
            watcher.join()
        assert http.get("/health").status_code == 200
    assert not is_running(frozen[0])
    assert server.metrics()["worker_restarts_total"] >= restarts + 1
    assert any("although there is work" in text for text in seen_unhealthy), seen_unhealthy
    assert f"no step was done in {2 * STALL_S} s" in server.log


def test_no_worker_outlives_its_server(server: ServerProcess) -> None:
    """Last of this file: it ends the server they share. In mid-stream, so that the worker is computing."""
    worker = server.the_worker()
    body = {"prompt": "a", "max_tokens": 2000, "temperature": 0, "ignore_eos": True}

    def on_line(num_pieces: int) -> None:
        if num_pieces == 5:
            server.send_signal(signal.SIGKILL)

    with server.http() as http, pytest.raises(httpx.HTTPError):
        stream_text(http, body, on_line)
    eventually(lambda: not is_running(worker))


@pytest.mark.slow
def test_killed_in_mid_stream_with_smollm2(serve: Serve) -> None:
    server = serve("--kv-cache-memory", "256MiB", "--max-model-len", "1024", model=str(smollm2_gguf()))
    prompts = ["Once upon a time", "The capital of France is", "def fibonacci(n):", "1, 2, 3, 4,"]
    undisturbed = four_answers(server, prompts, 32)
    assert " Paris" in undisturbed[1]
    assert four_answers(server, prompts, 32, at=8) == undisturbed
    assert server.wait_until_idle()["worker_restarts_total"] == 1
