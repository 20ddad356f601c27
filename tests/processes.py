"""What tests ask of processes that they or a server have started, and how long they wait for anything."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 120.0
"""How long anything may take on a machine that is busy with other things. Not a statement about speed."""

WORKER = "ksana.devices.worker"
"""The program of an engine's workers."""


def eventually(
    condition: Callable[[], T | None], timeout_s: float = PATIENCE_S, explain: Callable[[], str] | None = None
) -> T:
    """Wait until `condition()` is true, and return what it gave."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, explain() if explain else f"not within {timeout_s} s"
        time.sleep(0.02)
    return value


def read_to_the_end(reader: threading.Thread) -> None:
    """Wait for the thread that reads what a process says; it ends when nobody can say anything any more."""
    reader.join(PATIENCE_S)
    assert not reader.is_alive(), "something that the process started still runs and holds its stderr"


def is_running(pid: int) -> bool:
    """Whether the process can still do anything; what is left of one that nobody has reaped cannot."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children_that_run(program: str, parent: int) -> list[int]:
    """The process ids of the children that are alive and have `program` in their command line. There may be
    others for a moment, such as the ldconfig that Python asks for libraries."""
    children: list[int] = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        children += [int(child) for child in _text_of(task / "children").split()]
    return [
        child
        for child in children
        if is_running(child) and program in _text_of(Path(f"/proc/{child}/cmdline")).replace("\0", " ")
    ]


def _text_of(file: Path) -> str:
    """A file of a process or a thread; empty when that has ended meanwhile."""
    try:
        return file.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
