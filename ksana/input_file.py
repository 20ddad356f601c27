"""Files that people give: opened without waiting, read whole, but never more than they may be.

A name may stand for anything: a link to a device without end, a pipe that nobody writes to, a directory. So a
file is opened without waiting for anybody, and only then looked at.
"""

from __future__ import annotations

import os
import select
import stat
import time
from pathlib import Path

from ksana.errors import ConfigError, KsanaError
from ksana.shown import shown_path

PIPE_TIMEOUT_S = 10.0
"""How long the writer of a pipe (`--config <(...)` of a shell) may take."""
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: Path, error: type[KsanaError] = ConfigError, name: str | None = None) -> int:
    """A descriptor of a regular file, or of the one that a link leads to. Who asks must close it.

    Raises `error` with the name for whatever else the path is.
    """
    return _open(path, error, name or shown_path(path), pipes=False)


def read_input(
    path: Path,
    max_bytes: int,
    name: str | None = None,
    *,
    error: type[KsanaError] = ConfigError,
    pipes: bool = True,
) -> bytes:
    """What the file holds. Raises `error`, with its name, if it cannot be read or is larger.

    `pipes`: whether a pipe will do; its writer has PIPE_TIMEOUT_S. A pipe without one is empty.
    """
    name = name or shown_path(path)
    descriptor = _open(path, error, name, pipes=pipes)
    try:
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            content = _read_pipe(descriptor, max_bytes + 1)
        else:
            content = _read(descriptor, max_bytes + 1)
    except OSError as failure:
        raise error(f"{name} cannot be read: {failure.strerror or failure}") from None
    finally:
        os.close(descriptor)
    if len(content) > max_bytes:
        raise error(f"{name} is larger than {max_bytes} bytes")
    return content


def _open(path: Path, error: type[KsanaError], name: str, *, pipes: bool) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as failure:
        raise error(f"{name} cannot be read: {failure.strerror or failure}") from None
    except ValueError as failure:  # a NUL in the name, or what cannot be written as bytes
        raise error(f"{name} cannot be read: {failure}") from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode)):
        return descriptor
    os.close(descriptor)
    raise error(
        f"{name} cannot be read: it is {_KINDS.get(stat.S_IFMT(mode), 'no file')}, not a regular file"
    )


def _read(descriptor: int, num_bytes: int) -> bytes:
    pieces, left = [], num_bytes
    while left and (piece := os.read(descriptor, min(left, 1 << 24))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _read_pipe(descriptor: int, num_bytes: int) -> bytes:
    deadline = time.monotonic() + PIPE_TIMEOUT_S
    pieces, left = [], num_bytes
    while left:
        try:
            piece = os.read(descriptor, min(left, 1 << 16))
        except BlockingIOError:  # somebody is there who has not written yet
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(None, f"nothing came for {PIPE_TIMEOUT_S:.0f} s") from None
            continue
        if not piece:
            break
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
