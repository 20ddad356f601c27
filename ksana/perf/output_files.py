"""Files that a measurement leaves: found out before it begins whether they can be written, and over what."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ksana.errors import ConfigError


def check_outputs(inputs: Mapping[str, Path], outputs: Mapping[str, Path]) -> None:
    """By what they are called where they were named. Raises ConfigError if an output cannot be written, or
    would replace an input or another output."""
    taken = {os.path.realpath(path): name for name, path in inputs.items()}
    for name, path in outputs.items():
        check_can_write(name, path)
        former = taken.setdefault(os.path.realpath(path), name)
        if former != name:
            raise ConfigError(f"{name} {path} would replace the {former}; name another file")


def check_can_write(name: str, path: Path) -> None:
    """Raises ConfigError if a file cannot be written there."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise ConfigError(f"{name} {path} is a directory")
    if target.exists() and not target.is_file():
        raise ConfigError(f"{name} {path} is no regular file, and would be replaced")
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
            pass
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be written: {error.strerror}") from None
