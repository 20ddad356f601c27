"""Files that people give: read whole, but never more than they may be."""

from __future__ import annotations

from pathlib import Path

from ksana.errors import ConfigError


def read_input(path: Path, max_bytes: int, name: str | None = None) -> bytes:
    """What the file holds. Raises ConfigError, with its name, if it cannot be read or is larger."""
    name = str(path) if name is None else name
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in the name
        raise ConfigError(f"{name!r} cannot be read: {error}") from None
    if len(content) > max_bytes:
        raise ConfigError(f"{name} is larger than {max_bytes} bytes")
    return content
