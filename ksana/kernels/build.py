"""Compiles the C kernels once per machine, compiler and source, into the user's cache directory.

The file name is a SHA-256 over the sources, the compiler's version, the flags and what the CPU can do, so
a stale library is never loaded. It is written under a temporary name and renamed, so processes that build at
the same time all end with a whole file. Code is loaded from that directory, so it must belong to the user and
be writable by nobody else.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
COMPILERS = ("gcc", "cc", "clang")
FLAGS = (
    *("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"),
    *("-shared", "-fPIC", "-pthread"),
)
COMPILE_TIMEOUT_S = 300.0

log = logging.getLogger(__name__)


class BuildError(Exception):
    """The library could not be built; the text says why."""


def build() -> Path:
    """Path of the compiled library, built now if it is not there. Raises BuildError."""
    try:
        directory = _directory()
        compiler = find_compiler()
        target = directory / f"kernels-{_key(compiler)}.so"
        if not target.exists():
            _compile(compiler, target)
        _require_private(target)
        return target
    except OSError as error:
        raise BuildError(f"cannot build the native kernels: {error}") from error


def _directory() -> Path:
    """The cache directory or, where there can be none, one that lives as long as this process."""
    try:
        return cache_directory()
    except (OSError, RuntimeError) as error:  # read-only, or no home
        directory = tempfile.mkdtemp(prefix="ksana-kernels-")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        log.warning("no cache for compiled kernels (%s): they are compiled at every start", error)
        return Path(directory)


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/ksana/kernels or ~/.cache/ksana/kernels, made if need be. BuildError if unsafe."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    directory = root / "ksana" / "kernels"
    for path in (directory.parent, directory):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_private(path)
    return directory


def _require_private(path: Path) -> None:
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        raise BuildError(
            f"{path} must belong to this user and be writable by nobody else: code is loaded from it"
        )


def find_compiler() -> str:
    """Path of $CC, if set, or of the first C compiler in PATH. Raises BuildError."""
    wanted = os.environ.get("CC")
    for name in (wanted,) if wanted else COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(f"no C compiler ({wanted or ', '.join(COMPILERS)}) found; install gcc")


def source_files() -> list[Path]:
    """The C files and their header, sorted."""
    return sorted(path for path in SOURCES.iterdir() if path.suffix in (".c", ".h"))


def _native_flag() -> str:
    return "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"


def _key(compiler: str) -> str:
    digest = hashlib.sha256()
    for path in source_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=30.0, check=False).stdout
    digest.update(version + b"\0" + " ".join((*FLAGS, _native_flag())).encode() + b"\0" + _cpu().encode())
    return digest.hexdigest()[:32]


def _cpu() -> str:
    """The machine's type and instruction sets, as the kernel lists them for the first core."""
    lines = [platform.machine()]
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith(("model name", "flags", "Features", "CPU part")):
                    lines.append(line.strip())
                elif not line.strip():
                    break
    except OSError:
        lines.append(platform.processor())
    return "\n".join(lines)


def _compile(compiler: str, target: Path) -> None:
    log.info("compiling the native kernels with %s, once", compiler)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".building-", suffix=".so")
    os.close(handle)
    sources = [str(path) for path in source_files() if path.suffix == ".c"]
    failures = []
    try:
        for machine in (_native_flag(), None):
            flags = [*FLAGS, machine] if machine else list(FLAGS)
            try:
                done = subprocess.run(
                    [compiler, *flags, "-o", name, *sources, "-lm"],
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=COMPILE_TIMEOUT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise BuildError(f"{compiler} took longer than {COMPILE_TIMEOUT_S:.0f} s") from error
            if done.returncode == 0:
                os.chmod(name, 0o700)
                os.replace(name, target)
                return
            failures.append(done.stderr.strip()[:500])
        raise BuildError(f"{compiler} cannot compile the kernels: {failures[0]}")
    finally:
        Path(name).unlink(missing_ok=True)
