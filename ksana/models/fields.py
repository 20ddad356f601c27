"""Typed, bounded reading of values that come from a config.json or from GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ksana.errors import ModelLoadError

MAX_SIZE = 1 << 24
"""No layer count, vocabulary or context of a decoder is larger; what claims more is broken or hostile."""


class Fields:
    """Named values with the place they came from, so that every complaint can say it.

    A value of None counts as absent, as it does in config.json. Raises ModelLoadError.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values, self.source = values, source

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def fail(self, key: str, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self.source}: {key} {problem}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing")
            return default
        return value

    def size(self, key: str, default: int | None = None, *, at_least: int = 1) -> int:
        """An integer from `at_least` to MAX_SIZE."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= MAX_SIZE:
            raise self.fail(key, f"is {value!r}, not an integer from {at_least} to {MAX_SIZE}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, f"is {value!r}, not a number")
        if not (math.isfinite(value) and value > 0):
            raise self.fail(key, f"is {value!r}, not a finite number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"is {value!r}, not true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.fail(key, f"is {value!r}, not a string")
        return value

    def token_id(self, key: str) -> int | None:
        """A token id, or None if there is none."""
        return self.size(key, at_least=0) if key in self else None

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for item in ids:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= MAX_SIZE:
                raise self.fail(key, f"holds {item!r}, not a token id")
        return tuple(ids)

    def section(self, key: str) -> Fields | None:
        """A nested object, or None if there is none."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(key, f"is {value!r}, not an object")
        return Fields(value, f"{self.source}: {key}")

    def refuse_unless(self, key: str, neutral: tuple[Any, ...], reason: str) -> None:
        """Fail when a value is present and would change the computation in a way that is not built."""
        value = self.values.get(key)
        if value is not None and value not in neutral:
            raise self.fail(key, f"is {value!r}: {reason}")
