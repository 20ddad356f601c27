"""Reading JSON that people write: capped, strict about keys and types, with errors that say where."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ksana.errors import ConfigError
from ksana.input_file import read_input

MAX_FILE_BYTES = 16 << 20


class Place:
    """Where a value stands: the file, and the way to it. Raises the errors about it."""

    def __init__(self, file: Path, *path: str) -> None:
        self._file, self._path = file, path

    def inner(self, *path: str) -> Place:
        return Place(self._file, *self._path, *path)

    def fail(self, text: str) -> NoReturn:
        where = ": ".join((str(self._file), *self._path))
        raise ConfigError(f"{where}: {text}")

    def table(self, value: object, allowed: Collection[str], required: Collection[str]) -> dict[str, Any]:
        """An object with these keys only."""
        if not isinstance(value, dict):
            self.fail(f"must be an object with {_listed(required)}, not {shown(value)}")
        for key in value:
            if key not in allowed:
                self.inner(shown(key)).fail(f"unknown key; known are {_listed(allowed)}")
        for key in required:
            if key not in value:
                self.inner(key).fail("is missing")
        return value

    def items(self, value: object, what: str, max_items: int) -> list[Any]:
        """A list with something in it."""
        if not isinstance(value, list):
            self.fail(f"must be a list of {what}, not {shown(value)}")
        if not 1 <= len(value) <= max_items:
            self.fail(f"must hold 1 to {max_items} {what}, not {len(value)}")
        return value

    def integer(self, table: Mapping[str, object], key: str, low: int, high: int, default: int | None) -> int:
        """The number under `key`, or the default where there is one and no number is given."""
        if key not in table and default is not None:
            return default
        value = table[key]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.inner(key).fail(f"must be a whole number from {low} to {high}, not {shown(value)}")
        return value

    def text(self, table: Mapping[str, object], key: str, default: str | None = None) -> str:
        if key not in table and default is not None:
            return default
        value = table[key]
        if not isinstance(value, str) or not 1 <= len(value) <= 4096 or not value.isprintable():
            self.inner(key).fail(f"must be a text of one line, not {shown(value)}")
        return value


def shown(value: object) -> str:
    """The value as in the file, cut short."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = ascii(value) if not isinstance(value, bool | None) else json.dumps(value)
    return text if len(text) <= 60 else text[:60] + "..."


def read_json(file: Path) -> Any:
    """What the file holds. Raises ConfigError if it cannot be read, is too large or is not JSON, also when a
    key stands twice in an object."""
    raw = read_input(file, MAX_FILE_BYTES, f"{file}:")
    try:
        return json.loads(raw, object_pairs_hook=_no_doubles, parse_constant=_no_constant)
    except RecursionError:
        raise ConfigError(f"{file}: is nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"{file}: is not JSON as expected: {error}") from None


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        double = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {shown(double)} stands twice in one object")
    return table


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _listed(keys: Collection[str]) -> str:
    return ", ".join(sorted(keys)) or "nothing"
