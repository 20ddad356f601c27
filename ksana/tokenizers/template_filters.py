"""Filters and tests for chat templates: Jinja's own where they cannot grow, ours where they can.

Left out of Jinja's set, because no chat template needs them and they are costly, random or produce HTML:
attr, batch, center, filesizeformat, forceescape, format, pprint, random, slice, striptags, urlencode, urlize,
wordwrap, xmlattr.
"""

from __future__ import annotations

import functools
import html
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import Environment
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.tests import TESTS

from ksana.tokenizers.template_budget import Budget, BudgetExceeded

_PLAIN_FILTERS = """
    abs capitalize count d default dictsort first float groupby int items last length lower map max min
    reject rejectattr reverse select selectattr sort string sum title trim truncate unique upper wordcount
"""
_ITERATING_FILTERS = """
    dictsort groupby map max min reject rejectattr reverse select selectattr sort sum unique
"""
_ITERATING = frozenset(f"do_{name}" for name in _ITERATING_FILTERS.split())
"""Names of Jinja's functions that take a text apart into characters."""
_MAX_INDENT = 64
_MAX_PRECISION = 64
_WIDE_FORMAT = re.compile(r"\d{4}|\{[^{}]*\{|%[^a-zA-Z%]*\*")
"""A width or precision of four digits, or one taken from the arguments."""


class MeteredFunctions:
    """Functions that pay before they work. `budget` gives the budget of the rendering in progress."""

    def __init__(self, budget: Callable[[], Budget], environment: Environment) -> None:
        self._budget = budget
        self._environment = environment

    def filters(self) -> dict[str, Callable[..., Any]]:
        """All filters, the internal ones of `ksana.tokenizers.template_sandbox.Metering` among them."""
        own: dict[str, Callable[..., Any]] = {
            "e": self.escape,
            "escape": self.escape,
            "indent": self.indent,
            "join": self.join,
            "list": self.iterate,
            "replace": self.replace,
            "round": self.round,
            "safe": self.text,
            "tojson": self.tojson,
            "_concat": self.concat,
            "_iterate": self.iterate,
            "_slice": self.slice_source,
            "_turn": self.turn,
            "_walk": self.walk,
        }
        return {name: self._metered(FILTERS[name]) for name in _PLAIN_FILTERS.split()} | own

    def tests(self) -> dict[str, Callable[..., Any]]:
        """Jinja's tests, paid for."""
        return {name: self._metered(test) for name, test in TESTS.items()}

    def _metered(self, function: Any) -> Callable[..., Any]:
        num_passed = int(hasattr(function, "jinja_pass_arg"))
        iterates = function.__name__ in _ITERATING

        @functools.wraps(function)  # keeps the mark by which Jinja passes its context
        def metered(*args: Any, **kwargs: Any) -> Any:
            budget = self._budget()
            given = args[num_passed:]
            budget.make(budget.read(given) + budget.walk(kwargs))
            if iterates and given and isinstance(given[0], str):
                budget.step(len(given[0]))
            return function(*args, **kwargs)

        return metered

    def turn(self, _: None) -> None:
        """A loop begins another turn."""
        self._budget().step()

    def walk(self, value: Any) -> Any:
        """A value was built, or is about to be compared."""
        self._budget().read((value,))
        return value

    def iterate(self, value: Any) -> Any:
        """A loop begins, or a list is made: the items, as something with a length."""
        step = self._budget().step
        if hasattr(value, "__len__"):
            step(len(value))
            return value if isinstance(value, list | tuple | Mapping | range) else list(value)
        items = []
        for item in value:
            step()
            items.append(item)
        return items

    def slice_source(self, value: Any) -> Any:
        """A part of `value` is about to be copied."""
        if isinstance(value, str):
            self._budget().make(len(value))
        elif isinstance(value, list | tuple):
            self._budget().step(len(value))
        return value

    def text(self, value: Any) -> str:
        self._budget().make(self._budget().walk(value))
        return str(value)

    def concat(self, values: list[Any]) -> str:
        return "".join(map(self.text, values))

    def escape(self, value: Any) -> str:
        self._budget().make(6 * self._budget().walk(value))
        return html.escape(str(value)).replace("&quot;", "&#34;").replace("&#x27;", "&#39;")

    def join(self, values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            values = map(make_attrgetter(self._environment, attribute), values)
        texts = [self.text(value) for value in self.iterate(values)]
        separator = str(d)
        self._budget().make(sum(map(len, texts)) + len(separator) * len(texts))
        return separator.join(texts)

    def replace(self, value: Any, old: str, new: str, count: int | None = None) -> str:
        text, old, new = str(value), str(old), str(new)
        times = text.count(old) if old else len(text) + 1
        self._budget().make(len(text) + times * len(new))
        return text.replace(old, new, -1 if count is None else count)

    def indent(self, value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        margin = width if isinstance(width, str) else " " * min(width, _MAX_INDENT + 1)
        if len(margin) > _MAX_INDENT:
            raise BudgetExceeded(f"it indents by more than {_MAX_INDENT} characters")
        lines = str(value) + "\n"
        self._budget().make(len(lines) + len(margin) * lines.count("\n"))
        indented: str = FILTERS["indent"](str(value), margin, first, blank)
        return indented

    def round(self, value: float, precision: int = 0, method: str = "common") -> float:
        if not -_MAX_PRECISION <= precision <= _MAX_PRECISION:
            raise BudgetExceeded(f"it rounds to {precision} digits")
        rounded: float = FILTERS["round"](value, precision, method)
        return rounded

    def tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as chat templates expect it: nothing escaped for HTML, not even non-ASCII characters."""
        budget = self._budget()
        if indent is not None and not 0 <= indent <= _MAX_INDENT:
            raise BudgetExceeded(f"it indents JSON by {indent} characters")
        budget.make((6 if ensure_ascii else 2) * budget.walk(value) + 16 * (indent or 0))
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def check_format(self, template: str) -> None:
        """Refuse format strings whose output may be much longer than their input."""
        self._budget().make(len(template))
        if _WIDE_FORMAT.search(template):
            raise BudgetExceeded("it formats with a width or precision of four digits or from an argument")
