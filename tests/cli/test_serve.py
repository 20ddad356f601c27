"""`ksana serve` as a process, on a tiny model: what is said, what is served, how it ends."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from ksana.cli.main import main
from tests.models_for_tests import tiny_llama_gguf
from tests.processes import eventually, is_running
from tests.server.process import ServerProcess


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Makes a server of a tiny model, with more arguments and variables of the environment."""
    model = tiny_llama_gguf(tmp_path)
    servers: list[ServerProcess] = []

    def start(*argv: str, **environ: str) -> ServerProcess:
        arguments = (str(model), "--port", "0", "--kv-cache-memory", "2MiB", *argv)
        server = ServerProcess(*arguments, environ={"KSANA_KERNELS": "reference", **environ})
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.kill()


BODY = {"prompt": "a", "max_tokens": 200, "stream": True, "ignore_eos": True, "temperature": 0}


@pytest.mark.slow
def test_it_says_what_it_serves_and_drains(start: Callable[..., ServerProcess]) -> None:
    server = start("--served-model-name", "tiny", "--drain-timeout", "30")
    url = server.url
    command = shlex.split(server.wait_for_line(r"try +(curl .*)")[1])
    body = command[command.index("-d") + 1]
    answer = httpx.post(
        command[1], content=body, headers={"Content-Type": "application/json"}, timeout=60, trust_env=False
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "tiny"
    with server.http() as client, client.stream("POST", "/v1/completions", json=BODY) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        server.send_signal(signal.SIGTERM)
        server.wait_for_line("SIGTERM: no new requests")
        # A stream that runs goes on to its end; what comes now is refused.
        with pytest.raises(httpx.HTTPError):
            httpx.post(f"{url}/v1/completions", json=BODY, trust_env=False).raise_for_status()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    code, out, err = server.wait(60)
    assert code == 0, err
    assert out == ""
    assert "Traceback" not in err
    for part in ("serves tiny", "float32", "KV pool", "limits", "Loading  ["):
        assert part in err


@pytest.mark.slow
def test_a_second_signal_ends_streams_and_leaves_no_worker(start: Callable[..., ServerProcess]) -> None:
    server = start("--max-num-seqs", "1")
    workers = server.workers if server.url else []
    assert len(workers) == 1
    endless = {**BODY, "max_tokens": 1000}
    with server.http() as client, client.stream("POST", "/v1/completions", json=endless) as stream:
        lines = stream.iter_lines()
        next(lines)
        started = time.monotonic()
        server.send_signal(signal.SIGINT)
        server.wait_for_line("SIGINT: no new requests")
        server.send_signal(signal.SIGINT)
        code, _, err = server.wait(60)
        assert time.monotonic() - started < 10
        assert code == 130, err
        assert "Traceback" not in err
        rest = [line for line in lines if line]
    assert "[DONE]" in rest[-1] or "error" in rest[-1]
    eventually(lambda: not any(map(is_running, workers)), 5)


@pytest.mark.slow
def test_ctrl_c_while_loading(start: Callable[..., ServerProcess]) -> None:
    server = start()
    workers = eventually(lambda: server.workers, 30)
    server.send_signal(signal.SIGINT)
    code, out, err = server.wait(60)
    assert (code, out) == (130, "")
    assert "Traceback" not in err
    eventually(lambda: not any(map(is_running, workers)), 5)


@pytest.mark.slow
def test_a_key_from_the_environment_is_asked_for_and_not_shown(start: Callable[..., ServerProcess]) -> None:
    server = start(KSANA_API_KEY="hush-hush")
    url = server.url
    assert httpx.get(f"{url}/v1/models", trust_env=False).status_code == 401
    headers = {"Authorization": "Bearer hush-hush"}
    assert httpx.get(f"{url}/v1/models", headers=headers, trust_env=False).status_code == 200
    server.send_signal(signal.SIGTERM)
    code, _, err = server.wait(60)
    assert code == 0
    assert "hush-hush" not in err


@pytest.mark.slow
def test_a_worker_that_cannot_start_is_explained(start: Callable[..., ServerProcess]) -> None:
    code, out, err = start(KSANA_KERNELS="nonsense").wait(60)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("ksana: the worker could not start")
    assert "KSANA_KERNELS is 'nonsense'" in err.splitlines()[-1]


def test_a_port_in_use_is_found_out_before_the_model_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "/no/such/model.gguf", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["/no/such", "--served-model-name", "a\udcff"], ["/no/such/\udcff"]])
def test_a_name_that_no_answer_could_hold(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *argv, "--port", "0"]) == 2
    assert "printable characters" in capsys.readouterr().err


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/no/such/model.gguf", "--port", "0"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "/no/such/model.gguf" in err
    assert "Traceback" not in err


def test_what_others_may_read_of_secrets_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the model is looked for: here there is none."""
    for name in list(os.environ):
        if name.startswith("KSANA_"):
            monkeypatch.delenv(name)
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    for mode, said in ((0o644, True), (0o600, False)):
        keys.chmod(mode)
        assert main(["serve", "/nowhere/model", "--port", "0", "--api-key-file", str(keys)]) == 3
        text = capsys.readouterr().err
        line = f"the API key file {keys} can be read by others on this machine (mode 0644): `chmod 600` it"
        assert (line in text) == said
        assert "secret" not in text
