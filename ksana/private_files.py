"""Files and directories for the owner alone, whatever the umask: those from which prompts could be read."""

from __future__ import annotations

import contextlib
import logging
import os
import stat

log = logging.getLogger(__name__)

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """A descriptor of a file that is made with mode 0600 if need be; one of ours that is there is tightened.
    Raises OSError."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, FILE_MODE)
    with contextlib.suppress(OSError):  # it may be another user's
        tighten(descriptor, FILE_MODE)
    return descriptor


def tighten(descriptor: int, mode: int) -> None:
    """Nobody but the owner may do anything, and the owner what `mode` says. Raises OSError."""
    if stat.S_IMODE(os.fstat(descriptor).st_mode) != mode:
        os.fchmod(descriptor, mode)


def make_private_directories(path: str | os.PathLike[str]) -> None:
    """The directory and those above it, as far as they are not there, each with mode 0700. Raises OSError:
    FileExistsError where something else stands in the place of one."""
    path = os.path.abspath(path)
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for one in reversed(missing):
        try:
            os.mkdir(one, DIRECTORY_MODE)
        except FileExistsError:
            if not os.path.isdir(one):
                raise
        else:
            os.chmod(one, DIRECTORY_MODE)


def exposure(path: str | os.PathLike[str]) -> str | None:
    """Who else may read or write a file or directory, to follow its name: `can be read by others (mode
    0755)`. None: nobody, or it cannot be told."""
    try:
        info = os.stat(path)
    except OSError:
        return None
    mode = stat.S_IMODE(info.st_mode)
    if info.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user (uid {info.st_uid})"
    may = [word for word, bits in (("read", 0o044), ("written", 0o022)) if mode & bits]
    if not may and not mode & 0o077:
        return None
    return f"can be {' and '.join(may) or 'entered'} by others on this machine (mode {mode:04o})"


def warn_if_exposed(path: str | os.PathLike[str], name: str) -> None:
    """A line in the log where others may read or write a file that is a secret."""
    exposed = exposure(path)
    if exposed is not None:
        log.warning("%s %s %s: `chmod 600` it", name, path, exposed)
