"""Filters and tests for chat templates: Jinja's own, each paid for before it works.

Left out of Jinja's set, because no chat template needs them and they are costly, random or produce HTML:
attr, batch, center, filesizeformat, pprint, random, slice, striptags, urlencode, urlize, wordwrap, xmlattr.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

from jinja2 import Environment
from jinja2.exceptions import TemplateError
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.tests import TESTS
from markupsafe import escape

from ksana.tokenizers import template_filter_prices as prices
from ksana.tokenizers.template_budget import Budget, BudgetExceeded
from ksana.tokenizers.template_prices import ESCAPED, pay_sum

_LOOKING = "count d default first last length"
_LAZY = "items map reject rejectattr reverse select selectattr"
_COMPARING = "dictsort groupby max min sort unique"
_TEXT = "capitalize lower safe string trim truncate upper"
_PRICES: dict[str, prices.Price] = {
    **dict.fromkeys(_LOOKING.split(), prices.look),
    **dict.fromkeys(_LAZY.split(), prices.items),
    **dict.fromkeys(_COMPARING.split(), prices.comparisons),
    **dict.fromkeys(_TEXT.split(), prices.text),
    "abs": prices.read,
    "float": prices.read,
    "format": prices.percent,
    "indent": prices.indent,
    "replace": prices.replace,
    "round": prices.round_off,
    **dict.fromkeys(("title", "wordcount"), prices.words),
}
_CHEAP_TESTS = """
    boolean callable defined divisibleby escaped even false filter float integer iterable mapping none number
    odd sameas sequence string test true undefined
"""
_PRICES_OF_TESTS: dict[str, prices.Price] = {
    **dict.fromkeys(TESTS, prices.read),
    **dict.fromkeys(_CHEAP_TESTS.split(), prices.look),
    **dict.fromkeys(("lower", "upper"), prices.text),
}


def _worked_off(items: Iterator[Any]) -> Iterator[Any]:
    """What Jinja makes lazily, made at once, and given as before: once, its error where it is reached.

    Lazy, a filter over a filter over a filter is as deep as there are filters, and to free twenty thousand
    of them overflows the stack of the process, which nothing in Python can catch.
    """
    made: list[Any] = []
    failure: Exception | None = None
    try:
        made.extend(items)
    except BudgetExceeded:
        raise
    except Exception as error:
        failure = error.with_traceback(None)
    return _given(made, failure)


def _given(made: list[Any], failure: Exception | None) -> Iterator[Any]:
    yield from made
    if failure is not None:
        raise failure


class MeteredFunctions:
    """Functions that pay before they work. `budget` gives the budget of the rendering in progress."""

    def __init__(self, budget: Callable[[], Budget], environment: Environment) -> None:
        self._budget = budget
        self._environment = environment

    def filters(self) -> dict[str, Callable[..., Any]]:
        """All filters, the internal ones of `ksana.tokenizers.template_metering` among them."""
        own: dict[str, Callable[..., Any]] = {
            **dict.fromkeys(("e", "escape"), self.escape),
            "forceescape": self.force_escape,
            "int": self.to_int,
            "join": self.join,
            "list": self.to_list,
            "sum": self.add_up,
            "tojson": self.tojson,
            "_concat": self.concat,
            "_iterate": self.iterate,
            "_refuse": self.refuse,
            "_slice": self.slice_source,
            "_turn": self.turn,
            "_walk": self.walk,
        }
        return {name: self._metered(FILTERS[name], price) for name, price in _PRICES.items()} | own

    def tests(self) -> dict[str, Callable[..., Any]]:
        """Jinja's tests, paid for."""
        return {name: self._metered(test, _PRICES_OF_TESTS[name]) for name, test in TESTS.items()}

    def _metered(self, function: Any, price: prices.Price) -> Callable[..., Any]:
        num_passed = int(hasattr(function, "jinja_pass_arg"))
        lazy = price is prices.items or price is prices.comparisons

        @functools.wraps(function)  # keeps the mark by which Jinja passes its context
        def metered(*args: Any, **kwargs: Any) -> Any:
            budget = self._budget()
            price(budget, *args[num_passed:], **kwargs)
            result = function(*args, **kwargs)
            return _worked_off(budget.each(result)) if lazy and isinstance(result, Iterator) else result

        return metered

    def refuse(self, what: str) -> None:
        raise TemplateError(f"{{% {what} %}} has no place in a chat template")

    def turn(self, _: None) -> None:
        """A loop begins another turn."""
        self._budget().step()

    def walk(self, value: Any) -> Any:
        """A value was built, or is about to be compared."""
        self._budget().read((value,))
        return value

    def iterate(self, value: Any) -> Any:
        """A loop begins over `value`."""
        if isinstance(value, Sized):
            self._budget().step(len(value))
            return value
        return self._budget().each(value)

    def to_list(self, value: Iterable[Any]) -> list[Any]:
        return list(self.iterate(value))

    def slice_source(self, value: Any) -> Any:
        """A part of `value` is about to be copied."""
        if isinstance(value, str):
            self._budget().make(len(value))
        elif isinstance(value, list | tuple):
            self._budget().step(len(value))
        return value

    def text(self, value: Any) -> str:
        self._budget().text(value)
        return str(value)

    def concat(self, values: list[Any]) -> str:
        return "".join(map(self.text, values))

    def escape(self, value: Any) -> Any:
        self._budget().text(value)
        self._budget().make(ESCAPED * self._budget().walk(value))
        return escape(value)

    def force_escape(self, value: Any) -> Any:
        return self.escape(self.text(value))

    def join(self, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            prices.check_path(attribute)
            value = map(make_attrgetter(self._environment, attribute), value)
        texts = [self.text(part) for part in self.iterate(value)]
        separator = self.text(d)
        self._budget().make(sum(map(len, texts)) + len(separator) * len(texts))
        return separator.join(texts)

    def to_int(self, value: Any, default: Any = 0, base: int = 10) -> Any:
        self._budget().read((value, default))
        number = FILTERS["int"](value, default, base)
        self._budget().walk(number)  # what the digits of another base may make is too large to work with
        return number

    def add_up(self, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
        """As Jinja's; lists are added one by one, since each sum is a copy."""
        budget = self._budget()
        if attribute is not None:
            prices.check_path(attribute)
            iterable = map(make_attrgetter(self._environment, attribute), iterable)
        values = list(self.iterate(iterable))
        budget.read((start, *values))
        if isinstance(start, str) or all(isinstance(value, int | float) for value in (start, *values)):
            return sum(values, start)
        total = start
        for value in values:
            pay_sum(budget, total, value)
            total = total + value
        return total

    def tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as chat templates expect it: nothing escaped for HTML, not even non-ASCII characters."""
        budget = self._budget()
        size = budget.walk(value)
        budget.make((12 if ensure_ascii else 6) * size)  # "\\ud83d\\ude00" and "\\u0001"
        prices.json_layout(budget, value, size, indent, separators)
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
