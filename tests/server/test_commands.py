"""What a person types and sees: the start block and its curl line, `ksana chat`, `ksana check`, log lines."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.models_for_tests import smollm2_gguf
from tests.processes import PATIENCE_S, eventually
from tests.server.conftest import Serve
from tests.server.process import COMMAND, ENTRY_POINT, ServerProcess

GREEDY = {"temperature": 0, "ignore_eos": True}
NO_PROXY = {**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


def ksana(*argv: str, typed: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *argv],
        input=typed,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, **environ},
        check=False,
    )


def sh(line: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", line],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**NO_PROXY, **environ},
        check=False,
    )


def test_the_start_block(server: ServerProcess) -> None:
    assert server.url
    block = server.log[server.log.index("\nKsana ") :]
    for name in ("model", "computing", "KV pool", "limits", "sampling", "address", "try", "or"):
        assert re.search(rf"^  {name} +\S", block, re.MULTILINE), name
    assert "float32" in block
    assert "1.99 MiB: 170 blocks of 16 tokens (room for 2720 tokens)" in block
    assert "2048 tokens per request, 64 requests and 512 tokens per step, 256 more may wait" in block
    assert "no API key" in block
    assert "100%" in server.log[: server.log.index("\nKsana ")]


@pytest.mark.needs_program("curl", "curl")
def test_the_curl_line_works_as_it_is_printed(server: ServerProcess) -> None:
    line = server.wait_for_line(r"^  try +(curl .*)$")[1]
    done = sh(line + " --silent --show-error")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["object"] == "chat.completion"
    assert answer["model"] == server.model


def test_the_chat_line_works_as_it_is_printed(server: ServerProcess) -> None:
    line = server.wait_for_line(r"^  or +(.*)$")[1]
    done = sh(f"echo Hello | {line} --max-tokens 5 --temperature 0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
@pytest.mark.needs_program("curl", "curl")
def test_the_lines_work_with_a_key(serve: Serve, tmp_path: Path) -> None:
    """And with a name that a shell would take apart."""
    name = 'it\'s $HOME; `ls` "x"'
    key_file = tmp_path / "keys"
    key_file.write_text("open-sesame\nanother\n")
    server = serve("--api-key-file", str(key_file), "--served-model-name", name)
    line = server.wait_for_line(r"^  try +(curl .*)$")[1]
    answer = json.loads(sh(line + " --silent --show-error", KSANA_API_KEY="open-sesame").stdout)
    assert answer["model"] == name == server.model
    refused = json.loads(sh(line + " --silent --show-error", KSANA_API_KEY="wrong").stdout)
    assert refused["error"]["code"] == "invalid_api_key"
    chat = ("chat", "--url", server.url, "--max-tokens", "4")
    assert ksana(*chat, typed="Hi\n", KSANA_API_KEY="another").returncode == 0
    assert ksana(*chat, "--api-key-file", str(key_file), typed="Hi\n").returncode == 0
    wrong = ksana(*chat, typed="Hi\n", KSANA_API_KEY="wrong")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert "API key" in wrong.stderr
    assert "open-sesame" not in server.log


def test_chat_through_a_pipe_says_what_the_api_says(server: ServerProcess) -> None:
    questions = ["Name three rivers.", "And a lake?"]
    messages: list[dict[str, str]] = []
    answers = []
    with server.http() as http:
        for question in questions:
            messages.append({"role": "user", "content": question})
            body = {"messages": messages, "temperature": 0, "max_tokens": 12}
            answers.append(http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"])
            messages.append(answers[-1])
    flags = ("--url", server.url, "--temperature", "0", "--max-tokens", "12")
    done = ksana("chat", *flags, typed="\n".join(questions) + "\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\n")
    assert len(done.stdout) > 12
    # A random model says control characters, which a terminal must not be sent; letters come through.
    heard = "".join(letter for letter in done.stdout if letter.isalnum())
    assert heard == "".join(letter for one in answers for letter in one["content"] if letter.isalnum())


def test_chat_in_a_terminal(server: ServerProcess) -> None:
    ours, theirs = pty.openpty()
    command = [*COMMAND, "chat", "--port", str(server.port), "--max-tokens", "6", "--temperature", "0"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True)
    os.close(theirs)
    shown = b""

    def read_until(mark: bytes, count: int = 1) -> None:
        nonlocal shown
        while shown.count(mark) < count:
            shown += os.read(ours, 4096)

    try:
        read_until(server.model.encode())
        os.write(ours, b"Hello\n")
        read_until(b"tokens/s]")
        os.write(ours, b"/reset\n")
        read_until(b"Forgotten.")
        os.write(ours, b"Again\n")
        read_until(b"tokens/s]", 2)
        # Only at the prompt: an end of input typed while the terminal changes modes gets lost.
        read_until(b"> ", 4)
        os.write(ours, b"\x04")
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert b"Traceback" not in shown


def test_chat_without_a_server() -> None:
    done = ksana("chat", "--url", "http://127.0.0.1:9", typed="Hi\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no server answers at http://127.0.0.1:9" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_check_says_what_serve_does(server: ServerProcess, tiny_model: Path) -> None:
    done = ksana("check", str(tiny_model), "--kv-cache-memory", "2MiB")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^  fits +yes$", done.stdout, re.MULTILINE)
    pool = re.search(r"^  KV pool +(.*)$", done.stdout, re.MULTILINE)
    assert pool
    assert f"KV pool    {pool[1]}" in (server.url and server.log)
    assert "3 layers" in done.stdout


@pytest.mark.slow
def test_a_line_every_ten_seconds_while_there_is_work(server: ServerProcess) -> None:
    pattern = (
        r"^[0-9:]{8} ([0-9.]+) tokens/s out, ([0-9.]+) through the model, "
        r"(\d+) running, (\d+) waiting, KV (\d+)%"
    )
    num_lines = len(re.findall(pattern, server.log, re.MULTILINE)) if server.url else 0
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 300, **GREEDY}

    def worked() -> bool:
        with server.http() as http:
            assert http.post("/v1/completions", json=body).status_code == 200
        return len(re.findall(pattern, server.log, re.MULTILINE)) > num_lines

    eventually(worked)
    last = re.findall(pattern, server.log, re.MULTILINE)[-1]
    assert float(last[0]) > 0


def test_each_request_is_a_line_with_its_id(server: ServerProcess) -> None:
    with server.http() as http:
        body = {"prompt": "a", "max_tokens": 1, **GREEDY}
        answer = http.post("/v1/completions", json=body, headers={"X-Request-Id": "find-me-7"})
        assert answer.headers["x-request-id"] == "find-me-7"
    server.wait_for_line(r"POST '/v1/completions' 200 .* ms find-me-7$")


@pytest.mark.slow
@pytest.mark.needs_program("curl", "curl")
def test_the_demo_model_as_a_newcomer_meets_it(serve: Serve) -> None:
    smollm2_gguf()  # so that nothing is fetched in the time of the test, or it is skipped
    server = serve("--kv-cache-memory", "512MiB", model="smollm2-135m", command=ENTRY_POINT)
    line = server.wait_for_line(r"^  try +(curl .*)$")[1]
    answer = json.loads(sh(line + " --silent --show-error").stdout)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "River" in answer["choices"][0]["message"]["content"]
    done = ksana("chat", "--url", server.url, "--temperature", "0", typed="What is the capital of France?\n")
    assert done.returncode == 0
    assert "Paris" in done.stdout
    assert ksana("check", "smollm2-135m").returncode == 0
