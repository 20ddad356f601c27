"""Signals: what runs is finished, what comes is refused, and the process is gone when it said it would be."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.models_for_tests import smollm2_gguf
from tests.processes import PATIENCE_S, eventually, is_running
from tests.server.conftest import TINY_FLAGS, Serve
from tests.server.process import COMMAND, ServerProcess

ENDLESS = {"prompt": "a", "max_tokens": 2000, "temperature": 0, "ignore_eos": True, "stream": True}


class Stream:
    """A streaming completion that is read by a thread; `lines` grows."""

    def __init__(self, server: ServerProcess, **changes: Any) -> None:
        self.lines: list[str] = []
        self.error: httpx.HTTPError | None = None
        self._server = server
        self._body = ENDLESS | changes
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        eventually(lambda: self.lines)

    def _read(self) -> None:
        try:
            with (
                self._server.http() as http,
                http.stream("POST", "/v1/completions", json=self._body) as answer,
            ):
                self.lines.extend(line for line in answer.iter_lines() if line)
        except httpx.HTTPError as error:
            self.error = error

    def join(self) -> list[str]:
        self._thread.join(120)
        assert not self._thread.is_alive()
        return self.lines


def in_mid_stream(server: ServerProcess) -> tuple[Stream, httpx.Client]:
    """A stream that goes on for long, and a client whose connection is open already."""
    http = server.http()
    assert http.get("/ready").status_code == 200
    return Stream(server), http


def test_sigterm_lets_streams_end_and_refuses_new_requests(serve: Serve) -> None:
    server = serve("--drain-timeout", "100")
    worker = server.the_worker() if server.url else 0
    stream, http = in_mid_stream(server)
    # Frozen for a while, or the stream might be over before all that has been asked.
    os.kill(worker, signal.SIGSTOP)
    with contextlib.closing(http), server.http() as another:
        server.send_signal(signal.SIGTERM)
        server.wait_for_line("SIGTERM: no new requests are taken")
        # Over a connection that was open, and over a new one.
        for client in (http, another):
            for streaming in (True, False):
                answer = client.post("/v1/completions", json={**ENDLESS, "stream": streaming})
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "shutting_down"
                assert int(answer.headers["retry-after"]) > 0
            assert client.get("/ready").status_code == 503
            assert client.get("/health").status_code == 200
        os.kill(worker, signal.SIGCONT)
        lines = stream.join()
    assert stream.error is None
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    code, out, err = server.wait()
    assert (code, out) == (0, "")
    assert "Traceback" not in err
    eventually(lambda: not is_running(worker))


FRESH = (
    sys.executable,
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL);"
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])",
    "-m",
    "ksana.cli.main",
)
"""The command with the signals of a terminal, should the tests run under nohup."""


def test_a_hangup_is_a_sigterm(serve: Serve) -> None:
    server = serve("--drain-timeout", "100", command=FRESH)
    worker = server.the_worker() if server.url else 0
    stream, http = in_mid_stream(server)
    os.kill(worker, signal.SIGSTOP)
    with contextlib.closing(http):
        server.send_signal(signal.SIGHUP)
        server.wait_for_line("SIGHUP: no new requests are taken")
        assert http.post("/v1/completions", json=ENDLESS).status_code == 503
    os.kill(worker, signal.SIGCONT)
    assert stream.join()[-1] == "data: [DONE]"
    code, _, err = server.wait()
    assert code == 0
    assert "Traceback" not in err
    eventually(lambda: not is_running(worker))


def test_under_nohup_a_hangup_is_nothing(serve: Serve) -> None:
    server = serve(command=("nohup", *COMMAND))
    with server.http() as http:
        assert http.get("/ready").status_code == 200
        server.send_signal(signal.SIGHUP)
        for _ in range(5):
            assert http.get("/ready").status_code == 200
            time.sleep(0.1)
    server.send_signal(signal.SIGTERM)
    assert server.wait()[0] == 0


@pytest.mark.slow
def test_a_terminal_that_closes_lets_streams_end(tiny_model: Path) -> None:
    """The terminal tells the whole group of processes, and nothing can be written there any more."""
    master, terminal = pty.openpty()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [*FRESH, "serve", str(tiny_model), *TINY_FLAGS, "--port", str(port), "--drain-timeout", "100"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),
    )
    os.close(terminal)
    try:
        reader = threading.Thread(target=_read_all, args=(master,), daemon=True)
        reader.start()
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:

            def is_ready() -> bool:
                try:
                    return http.get("/ready").status_code == 200
                except httpx.ConnectError:
                    return False

            eventually(is_ready)
            with http.stream("POST", "/v1/completions", json=ENDLESS) as answer:
                lines = answer.iter_lines()
                assert next(lines).startswith("data: ")
                os.close(master)
                assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


def _read_all(terminal: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(terminal, 65536):
            pass


def test_what_does_not_end_in_time_gets_an_error(serve: Serve) -> None:
    """Held up by a frozen worker, so that no machine is fast enough to be done before."""
    server = serve("--drain-timeout", "1")
    worker = server.the_worker() if server.url else 0
    stream, http = in_mid_stream(server)
    os.kill(worker, signal.SIGSTOP)
    with contextlib.closing(http):
        server.send_signal(signal.SIGTERM)
        code, _, err = server.wait(60)
    lines = stream.join()
    assert code == 0
    assert stream.error is None, "the stream was cut instead of ended"
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert "data: [DONE]" not in lines
    assert "ending 1 requests that did not get done in time" in err
    assert "Traceback" not in err
    eventually(lambda: not is_running(worker))


def test_a_second_signal_does_not_wait(serve: Serve) -> None:
    server = serve("--drain-timeout", "1000")
    worker = server.the_worker() if server.url else 0
    stream, http = in_mid_stream(server)
    os.kill(worker, signal.SIGSTOP)  # or the stream might be over before the second signal
    with contextlib.closing(http):
        server.send_signal(signal.SIGTERM)
        server.wait_for_line("SIGTERM: no new requests are taken")
        time.sleep(0.1)
        server.send_signal(signal.SIGTERM)
        code, _, err = server.wait(60)
    assert code == 0
    assert "data: [DONE]" not in stream.join()
    assert "Traceback" not in err
    eventually(lambda: not is_running(worker))


@pytest.mark.slow
def test_idle_connections_do_not_hold_it_up(serve: Serve) -> None:
    server = serve("--drain-timeout", "1000")
    with server.http() as kept, socket.create_connection(("127.0.0.1", server.port)) as silent:
        assert kept.get("/version").status_code == 200
        silent.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")
        server.send_signal(signal.SIGTERM)
        code, _, err = server.wait(60)
    assert code == 0
    assert "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_while_loading(serve: Serve, number: signal.Signals) -> None:
    server = serve(command=FRESH)
    worker = server.the_worker()
    server.send_signal(number)
    code, out, err = server.wait(60)
    assert code == 128 + number
    assert out == ""
    assert "Traceback" not in err
    assert "serves" not in err
    eventually(lambda: not is_running(worker))


@pytest.mark.slow
def test_sigterm_with_smollm2(serve: Serve) -> None:
    server = serve("--kv-cache-memory", "256MiB", "--max-model-len", "1024", model=str(smollm2_gguf()))
    stream = Stream(server, max_tokens=48)
    server.send_signal(signal.SIGTERM)
    assert stream.join()[-1] == "data: [DONE]"
    assert server.wait()[0] == 0
