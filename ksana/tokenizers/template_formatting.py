"""Formatting in templates: `%`, `str.format` and `str.format_map`, paid for before they make anything.

A width or precision of four digits or more is refused, and so is one that `%` takes from its arguments:
both turn a few characters into as many as one likes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jinja2.sandbox import SandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from markupsafe import Markup

from ksana.tokenizers.template_budget import CHARS_PER_REPR, Budget, BudgetExceeded

_MAX_WIDTH = 999
_MAX_SPEC_CHARS = 100
_CHARS_PER_STEP = 8
"""Of a `%` template, which is read letter by letter."""
_MAX_NUMBER_CHARS = 400
"""A float in full has about as many characters before its point, an integer of 1024 bits fewer."""
_FLAGS = frozenset("#0- +.hlL")
_DIGITS = re.compile(r"\d+")
_ESCAPED = 6
"""Characters that one character may become in HTML, and more."""


class FormatMethod:
    """`text.format` or `text.format_map` as templates get it."""

    __slots__ = ("_environment", "_from_map", "text")

    def __init__(self, environment: SandboxedEnvironment, text: str, from_map: bool) -> None:
        self._environment = environment
        self._from_map = from_map
        self.text = text

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        if self._from_map:
            if kwargs or len(args) != 1:
                raise TypeError("format_map() takes exactly one argument, a mapping")
            (kwargs,), args = args, ()
        budget: Budget = self._environment.budget  # type: ignore[attr-defined]
        budget.make(len(self.text))
        budget.step(self.text.count("{") + self.text.count("}"))
        if isinstance(self.text, Markup):
            escaping = _MeteredEscapeFormatter(self._environment, escape=self.text.escape)
            return Markup(escaping.vformat(self.text, args, kwargs))
        return _MeteredFormatter(self._environment).vformat(self.text, args, kwargs)


class _MeteredFormatter(SandboxedFormatter):
    """Jinja's formatter, whose fields reach no further than the template; each field is paid for."""

    growth = 1

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion is not None:
            _pay_field(self._env, value, "")
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        _pay_field(self._env, value, format_spec, self.growth)
        return super().format_field(value, format_spec)


class _MeteredEscapeFormatter(_MeteredFormatter, SandboxedEscapeFormatter):
    """The same for text that is marked as HTML."""

    growth = _ESCAPED


def _pay_field(environment: Any, value: Any, format_spec: str, growth: int = 1) -> None:
    budget: Budget = environment.budget
    budget.text(value)
    budget.make(growth * (_checked_width(format_spec) + len(format_spec) + _MAX_NUMBER_CHARS))
    if growth > 1 and isinstance(value, str):
        budget.make(growth * len(value))


def _checked_width(spec: str) -> int:
    if len(spec) > _MAX_SPEC_CHARS:
        raise BudgetExceeded(f"it formats with {len(spec)} characters of flags, widths and precisions")
    widths = [int(digits) if len(digits) < 4 else _MAX_WIDTH + 1 for digits in _DIGITS.findall(spec)]
    if max(widths, default=0) > _MAX_WIDTH:
        raise BudgetExceeded(f"it formats with a width or precision above {_MAX_WIDTH}")
    return sum(widths)


def pay_percent(budget: Budget, template: str, values: object) -> None:
    """Pay for `template % values`. Raises BudgetExceeded for widths that are large or not written out."""
    budget.step(1 + template.count("%") + len(template) // _CHARS_PER_STEP)
    num_fields, width = _percent_fields(template)
    size = budget.walk(values, to_write=True)
    parts = values if isinstance(values, tuple) else (values,)
    if not all(isinstance(part, str | int | float) for part in parts) or "r" in template or "a" in template:
        size *= CHARS_PER_REPR
    if isinstance(values, Mapping):  # whose items may be written several times
        size *= num_fields
    growth = _ESCAPED if isinstance(template, Markup) else 1
    budget.make(len(template) + growth * size + width + num_fields * _MAX_NUMBER_CHARS)


def _percent_fields(template: str) -> tuple[int, int]:
    """How many values a `%` template takes, and the sum of its widths and precisions."""
    num_fields = width = 0
    position = template.find("%")
    while position >= 0:
        end = _after_key(template, position + 1)
        start = end
        while end < len(template) and (template[end] in _FLAGS or template[end] in "*0123456789"):
            end += 1
        spec = template[start:end]
        if "*" in spec:
            raise BudgetExceeded("it formats with a width or precision from an argument")
        width += _checked_width(spec)
        num_fields += template[end : end + 1] != "%"
        position = template.find("%", end + 1)
    return num_fields, width


def _after_key(template: str, position: int) -> int:
    """Where the `(key)` that may begin at `position` ends. Brackets in it are balanced."""
    if template[position : position + 1] != "(":
        return position
    depth = 0
    while position < len(template):
        depth += {"(": 1, ")": -1}.get(template[position], 0)
        position += 1
        if depth == 0:
            break
    return position
