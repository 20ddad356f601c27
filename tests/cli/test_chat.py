"""`ksana chat` against a small HTTP server in a thread: requests seen, output printed, errors said."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ksana.cli.main import main


class Server(ThreadingHTTPServer):
    """Answers each question with the number of messages it was sent; refuses a question that says so."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.key: str | None = None


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self._answer(401, {"error": {"message": "no such key"}})
        else:
            self._answer(200, {"data": [{"id": "small"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if body["messages"][-1]["content"] == "refuse":
            self._answer(400, {"error": {"message": "the prompt has 9 tokens\x1b[2J"}})
            return
        self.send_response(200)
        self.end_headers()
        for text in (str(len(body["messages"])), " \x1b[31mmessages"):
            self._event({"choices": [{"delta": {"content": text}}]})
        if body["messages"][-1]["content"] != "break":
            self._event({"choices": [], "usage": {"completion_tokens": 2}})
            self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def chat(monkeypatch: pytest.MonkeyPatch, server: Server, text: str, *flags: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return main(["chat", "--port", str(server.server_port), *flags])


def test_questions_answers_and_reset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], server: Server
) -> None:
    text = "one\n\ntwo\n/reset\nthree\n/nonsense\n/exit\nnever\n"
    assert chat(monkeypatch, server, text, "--temperature", "0", "--max-tokens", "9", "--seed", "3") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[:4] == ["1 [31mmessages", "3 [31mmessages", "Forgotten.", "1 [31mmessages"]
    assert out.splitlines()[4].startswith("There is no /nonsense.")
    assert len(server.bodies) == 3
    first, second, third = server.bodies
    assert (first["model"], first["temperature"], first["max_tokens"], first["seed"]) == ("small", 0.0, 9, 3)
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"] == "1 \x1b[31mmessages"
    assert third["messages"] == [{"role": "user", "content": "three"}]


@pytest.mark.parametrize(
    ("question", "said"), [("refuse", "the prompt has 9 tokens"), ("break", "before it was complete")]
)
def test_a_script_notices_errors(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    server: Server,
    question: str,
    said: str,
) -> None:
    assert chat(monkeypatch, server, f"{question}\nnever\n") == 1
    assert said in capsys.readouterr().err
    assert len(server.bodies) == 1


def test_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], server: Server, tmp_path: Any
) -> None:
    server.key = "right"
    assert chat(monkeypatch, server, "") == 1
    assert capsys.readouterr().err == "ksana: no such key; set KSANA_API_KEY or use --api-key-file\n"
    monkeypatch.setenv("KSANA_API_KEY", "right")
    assert chat(monkeypatch, server, "") == 0
    (tmp_path / "key").write_text("right\n")
    monkeypatch.setenv("KSANA_API_KEY", "wrong")
    assert chat(monkeypatch, server, "", "--api-key-file", str(tmp_path / "key")) == 0


def test_nobody_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    with Server() as server:
        port = server.server_port
    assert main(["chat", "--port", str(port)]) == 1
    err = capsys.readouterr().err
    assert f"no server answers at http://127.0.0.1:{port}" in err
    assert "ksana serve smollm2-135m" in err


@pytest.mark.parametrize(
    "flags",
    [
        ("--url", "ftp://x"),
        ("--url", "http://x:abc"),
        ("--url", "http://[x"),
        ("--url", "http://x", "--port", "1"),
        ("--port", "70000"),
        ("--port", "0"),
        ("--prot", "1"),
    ],
)
def test_wrong_flags(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]) -> None:
    assert main(["chat", *flags]) == 2
    assert capsys.readouterr().err.startswith("ksana: ")


def test_a_wrong_port_in_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KSANA_PORT", "abc")
    assert main(["chat"]) == 2
    assert capsys.readouterr().err == "ksana: KSANA_PORT: 'abc' is no port\n"
