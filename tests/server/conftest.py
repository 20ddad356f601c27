"""Server processes on a tiny model. Tests that do not end or configure their server share one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models_for_tests import tiny_llama_dir
from tests.server.process import ServerProcess

TINY_FLAGS = ("--port", "0", "--kv-cache-memory", "2MiB", "--num-threads", "1")
"""Room for 2,720 tokens of the tiny model, 2,048 of them in one request."""

KEY = "open-sesame"

Serve = Callable[..., ServerProcess]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama_dir(tmp_path_factory.mktemp("served"))


@pytest.fixture
def serve(tiny_model: Path) -> Iterator[Serve]:
    """Start servers with flags of their own: `serve("--max-num-seqs", "1", environ={...})`."""
    servers: list[ServerProcess] = []

    def start(*flags: str, model: str | None = None, **more: Any) -> ServerProcess:
        servers.append(ServerProcess(model or str(tiny_model), *TINY_FLAGS, *flags, **more))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[ServerProcess]:
    """One server for all tests that leave it as they found it."""
    process = ServerProcess(str(tiny_model), *TINY_FLAGS)
    yield process
    process.kill()


@pytest.fixture(scope="session")
def strict(tiny_model: Path) -> Iterator[ServerProcess]:
    """One that can do little: two requests at a time, three waiting, bodies of 20,000 bytes; it wants KEY."""
    flags = ("--max-num-seqs", "2", "--max-queued-requests", "3", "--max-body-bytes", "20000")
    process = ServerProcess(str(tiny_model), *TINY_FLAGS, *flags, environ={"KSANA_API_KEY": KEY})
    yield process
    process.kill()
