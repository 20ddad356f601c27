"""Typed, bounded reading of values that come from a config.json or from GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ksana.errors import ModelLoadError
from ksana.shown import shown

MAX_SIZE = 1 << 24
"""No vocabulary or context of a decoder is larger; what claims more is broken or hostile."""
MAX_LAYERS = 4096
"""The deepest decoders have some 130 layers. Much is made per layer before a tensor is looked at."""
MAX_END_TOKENS = 256
"""Ids that end an answer; models name a handful."""


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

    def size(
        self, key: str, default: int | None = None, *, at_least: int = 1, at_most: int = MAX_SIZE
    ) -> int:
        """An integer from `at_least` to `at_most`."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
            raise self.fail(key, f"is {shown(value)}, not an integer from {at_least} to {at_most}")
        return value

    def num_layers(self, key: str, default: int | None = None) -> int:
        return self.size(key, default, at_most=MAX_LAYERS)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, f"is {shown(value)}, not a number")
        try:
            number = float(value)
        except OverflowError:  # an integer of hundreds of digits
            number = math.inf
        if not (math.isfinite(number) and number > 0):
            raise self.fail(key, f"is {shown(value)}, not a finite number above 0")
        return number

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"is {shown(value)}, not true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.fail(key, f"is {shown(value)}, not a string")
        return value

    def token_id(self, key: str) -> int | None:
        """A token id, or None if there is none."""
        return self.size(key, at_least=0) if key in self else None

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if len(ids) > MAX_END_TOKENS:
            raise self.fail(key, f"lists {len(ids)} tokens; {MAX_END_TOKENS} are allowed")
        for item in ids:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= MAX_SIZE:
                raise self.fail(key, f"holds {shown(item)}, not a token id")
        return tuple(ids)

    def section(self, key: str) -> Fields | None:
        """A nested object, or None if there is none."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(key, f"is {shown(value)}, not an object")
        return Fields(value, f"{self.source}: {key}")

    def refuse_unless(self, key: str, neutral: tuple[Any, ...], reason: str) -> None:
        """Fail when a value is present and would change the computation in a way that is not built."""
        value = self.values.get(key)
        if value is not None and value not in neutral:
            raise self.fail(key, f"is {shown(value)}: {reason}")
