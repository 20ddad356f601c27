"""A Redis server of a test's own: started, killed, frozen and restarted at will. Nothing is kept on disk."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """Needs `redis-server` (mark such tests `needs_program("redis-server", "redis-server")`)."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.port = free_port()
        self.socket_path = directory / "redis.sock"
        self._directory = directory
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when it takes connections."""
        # A test run that is killed takes its servers with it, where there is util-linux.
        command = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        command += ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--unixsocket", str(self.socket_path), "--dir", str(self._directory), *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                    return
            except OSError:
                assert self._process.poll() is None, "redis-server ended at once"
                assert time.monotonic() < deadline, "redis-server does not answer"
                time.sleep(0.01)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def cli(self, *words: str, stdin: bytes | None = None) -> bytes:
        """What `redis-cli` prints, without the newline it adds. With `stdin` that is the last word."""
        command = ["redis-cli", "-p", str(self.port), *(["-x"] if stdin is not None else []), *words]
        done = subprocess.run(command, input=stdin, capture_output=True, check=True)
        return done.stdout.removesuffix(b"\n")
