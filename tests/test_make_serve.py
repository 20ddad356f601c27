"""`make serve` as people start and stop it: what a signal does to make, to the server and to its streams."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models_for_tests import tiny_llama_gguf
from tests.processes import children_that_run, eventually, is_running
from tests.server.process import ServerProcess

REPOSITORY = Path(__file__).parent.parent
BODY = {"prompt": "a", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs_program("make", "make"),
    pytest.mark.needs_program("gcc", "gcc"),
]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[ServerProcess]:
    """`make serve` of a tiny model in a copy of the repository whose .venv is this Python's, as installed."""
    for name in ("Makefile", "pyproject.toml", "scripts"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    venv = tmp_path / ".venv"
    venv.mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.name not in ("made", "installed"):
            (venv / entry.name).symlink_to(entry)
    for stamp in ("made", "installed"):
        (venv / stamp).touch()
    process = ServerProcess(
        f"MODEL={tiny_llama_gguf(tmp_path)}",
        "PORT=0",
        environ={"KSANA_KV_CACHE_MEMORY": "2MiB", "KSANA_NUM_THREADS": "1", "PYTHON": ""},
        command=("make", "--no-print-directory", "-C", str(tmp_path)),
    )
    yield process
    for pid in served(process) if is_running(process.pid) else []:
        os.kill(pid, signal.SIGKILL)
    process.kill()


def served(make: ServerProcess) -> list[int]:
    """The process ids of the servers that are make's own children."""
    return children_that_run("scripts/serve.py", make.pid)


def test_the_server_is_makes_own_child(make: ServerProcess) -> None:
    assert make.url
    assert ".venv/bin/ksana chat" in make.wait_for_line(r"^  or +(.*)$")[1]
    assert len(served(make)) == 1


@pytest.mark.parametrize("to_all", [False, True], ids=["make", "the process group"])
def test_sigterm_drains(make: ServerProcess, to_all: bool) -> None:
    """Also where the server gets it twice, once from make; nothing is left behind."""
    assert make.url
    (child,) = served(make)
    with make.http() as http, http.stream("POST", "/v1/completions", json=BODY) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        if to_all:
            os.kill(child, signal.SIGTERM)
        make.send_signal(signal.SIGTERM)
        make.wait_for_line("SIGTERM: no new requests")
        assert [line for line in lines if line][-1] == "data: [DONE]"
    code, _, err = make.wait()
    assert code == -signal.SIGTERM
    assert "***" not in err
    assert "SIGTERM again" not in err
    eventually(lambda: not is_running(child))


def test_ctrl_c_is_no_error(make: ServerProcess) -> None:
    """A terminal sends it to both."""
    assert make.url
    (child,) = served(make)
    os.kill(child, signal.SIGINT)
    make.send_signal(signal.SIGINT)
    code, _, err = make.wait()
    assert code == -signal.SIGINT
    assert "***" not in err
    assert "Traceback" not in err
    eventually(lambda: not is_running(child))


def test_an_error_is_one(tmp_path: Path, make: ServerProcess) -> None:
    assert make.url
    make.send_signal(signal.SIGTERM)
    make.wait()
    failing = ServerProcess(
        f"MODEL={tmp_path}/nothing.gguf",
        "PORT=0",
        environ={"PYTHON": ""},
        command=("make", "--no-print-directory", "-C", str(tmp_path)),
    )
    try:
        code, _, err = failing.wait()
    finally:
        failing.kill()
    assert code == 2
    assert "nothing.gguf" in err
    assert "Error 3" in err
