"""Which lines of the code that decides a swarm runs through: only there can it notice anything."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from simulations.swarm.mutants import PACKAGES


def reached_lines(root: Path, run: Callable[[], object]) -> dict[str, set[int]]:
    """Lines that `run` executes, by path below `root`. Slows what runs down several times."""
    reached: dict[str, set[int]] = {}
    lines_of: dict[str, set[int] | None] = {}

    def lines_in(filename: str) -> set[int] | None:
        """Where to note the lines of a file; None for one that is not looked at."""
        path = Path(filename)
        if not path.is_absolute() or not path.is_relative_to(root):
            return None
        relative = path.relative_to(root)
        if str(relative.parent) not in PACKAGES:
            return None
        return reached.setdefault(str(relative), set())

    def trace(frame: FrameType, _event: str, _argument: object) -> Any:
        filename = frame.f_code.co_filename
        if filename not in lines_of:
            lines_of[filename] = lines_in(filename)
        lines = lines_of[filename]
        if lines is None:
            return None

        def in_frame(inner: FrameType, event: str, _argument: object) -> Any:
            if event == "line":
                lines.add(inner.f_lineno)
            return in_frame

        return in_frame

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return reached
