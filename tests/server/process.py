"""A `ksana serve` process as its users have it: flags in, log lines out, HTTP at an address, signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.processes import PATIENCE_S, WORKER, children_that_run, eventually, read_to_the_end

COMMAND = (sys.executable, "-m", "ksana.cli.main")
ENTRY_POINT = (str(Path(sys.executable).with_name("ksana")),)
"""What is installed beside the interpreter: the same program as people call it."""


class ServerProcess:
    """Runs from its making on; `url` waits until it serves. Whoever makes one must `kill` it."""

    def __init__(
        self, *argv: str, environ: Mapping[str, str] | None = None, command: Sequence[str] = COMMAND
    ) -> None:
        self._process = subprocess.Popen(
            [*command, "serve", *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**_without_settings(os.environ), **(environ or {})},
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._url = ""

    def _read(self) -> None:
        assert self._process.stderr is not None
        self._lines.extend(iter(self._process.stderr.readline, ""))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        """What it has said on stderr so far."""
        return "".join(self._lines)

    @property
    def url(self) -> str:
        if not self._url:
            self._url = self.wait_for_line(r"^  address +(http://\S+)")[1]
        return self._url

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def model(self) -> str:
        self.url  # noqa: B018  # the model is named above the address
        return self.wait_for_line(r"^Ksana \S+ serves (.+)$")[1]

    def wait_for_line(self, pattern: str, timeout_s: float = PATIENCE_S) -> re.Match[str]:
        """The first match of `pattern` (multi-line) in the log. Fails when the process ends without it."""

        def found() -> re.Match[str] | None:
            ended = self._process.poll() is not None
            if ended:
                read_to_the_end(self._reader)
            match = re.search(pattern, self.log, re.MULTILINE)
            assert match or not ended, f"ended without {pattern!r}:\n{self.log}"
            return match

        return eventually(found, timeout_s, lambda: f"no {pattern!r} in:\n{self.log}")

    # What it serves

    def http(self, key: str = "") -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, trust_env=False, headers=headers)

    def openai(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)

    def metrics(self, key: str = "") -> dict[str, float]:
        """The values of all series without labels but the model's, by name without `ksana:`."""
        with self.http(key) as http:
            text = http.get("/metrics").raise_for_status().text
        found = re.findall(r'^ksana:(\w+)\{model_name="[^"]*"\} (\S+)$', text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def wait_until_idle(self, key: str = "") -> dict[str, float]:
        """Wait until nothing runs, waits or holds memory; the metrics then."""

        def idle() -> dict[str, float] | None:
            now = self.metrics(key)
            held = ("num_requests_running", "num_requests_waiting", "num_open_slots", "kv_cache_usage_perc")
            return now if not any(now[name] for name in held) else None

        return eventually(idle, PATIENCE_S, lambda: f"never idle: {self.metrics(key)}\n{self.log}")

    # How it ends

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    @property
    def workers(self) -> list[int]:
        """The process ids of its workers that are alive."""
        return children_that_run(WORKER, self.pid)

    def the_worker(self) -> int:
        """The process id of the one worker, once there is exactly one."""
        return eventually(lambda: self.workers[0] if len(self.workers) == 1 else None)

    def wait(self, timeout_s: float = PATIENCE_S) -> tuple[int, str, str]:
        """Exit code, stdout and stderr, when it has ended by itself or by a signal sent before."""
        code = self._process.wait(timeout=timeout_s)
        read_to_the_end(self._reader)
        assert self._process.stdout is not None
        return code, self._process.stdout.read(), self.log

    def kill(self) -> None:
        """End it in whatever state it is; its workers end with it."""
        self._process.kill()
        self._process.wait()
        read_to_the_end(self._reader)
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()


def post(path: str, body: Mapping[str, Any], *headers: str) -> bytes:
    """The bytes of a POST request, for bare sockets."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def _without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Whoever runs the tests may have settings of a server of their own in the environment."""
    return {
        name: value
        for name, value in environ.items()
        if name == "KSANA_KERNELS" or not name.startswith("KSANA_")
    }
