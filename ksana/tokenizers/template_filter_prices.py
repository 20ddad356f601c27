"""What Jinja's filters and tests cost a template: each takes the budget and the filter's own arguments.

A wrong argument is left for the filter to refuse in its own words.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any

from ksana.tokenizers.template_budget import Budget, BudgetExceeded, nesting
from ksana.tokenizers.template_formatting import pay_percent
from ksana.tokenizers.template_prices import CASED, pay_replace

Price = Callable[..., None]

_MAX_INDENT = 64
_MAX_PRECISION = 64
_MAX_PATH_CHARS = 256


def look(budget: Budget, *_args: Any, **_kwargs: Any) -> None:
    """Looks at a value, or at its size, and takes nothing apart."""
    budget.step()


def read(budget: Budget, *args: Any, **kwargs: Any) -> None:
    """Reads every part of its arguments."""
    budget.read((*args, *kwargs.values()))


def items(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    """Takes one item after the other, or makes a copy."""
    budget.read((*args, *kwargs.values()))
    check_path(kwargs.get("attribute"))
    if isinstance(value, str):
        budget.make(len(value))
    budget.step(len(value) if isinstance(value, Sized) else 1)


def comparisons(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    """Compares the items of a value with each other."""
    check_path(kwargs.get("attribute"))
    size = budget.read((value, *args, *kwargs.values()))
    num_items = len(value) if isinstance(value, Sized) else 1
    budget.step(num_items * (1 + num_items.bit_length()))
    budget.make(CASED * size)  # the keys of all items in small letters, at once


def text(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    """Makes a text of a value, and another of about its length."""
    budget.text(value)
    size = budget.walk(value)
    more = budget.read((*args, *kwargs.values()))
    budget.make(CASED * size + more)
    budget.scan(size, more)


def words(budget: Budget, value: Any) -> None:
    """Takes a text apart into words."""
    text(budget, value)
    budget.step(budget.walk(value) // 2)


def percent(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    """The filter `format`."""
    budget.text(value)
    pay_percent(budget, str(value), kwargs or args)


def indent(budget: Budget, value: Any, width: Any = 4, *_args: Any, **_kwargs: Any) -> None:
    """The filter `indent`."""
    margin = len(width) if isinstance(width, str) else max(width, 0)
    if margin > _MAX_INDENT:
        raise BudgetExceeded(f"it indents by more than {_MAX_INDENT} characters")
    if isinstance(value, str):
        budget.lines(value)
        num_lines = 1 + len(value.splitlines())
        budget.make(len(value) + margin * num_lines)


def replace(budget: Budget, value: Any, old: Any, new: Any, count: int | None = None) -> None:
    """The filter `replace`."""
    for part in (value, old, new):
        budget.text(part)
    pay_replace(budget, str(value), str(old), str(new), -1 if count is None else count)


def round_off(budget: Budget, value: Any, precision: int = 0, *args: Any, **kwargs: Any) -> None:
    """The filter `round`."""
    budget.read((value, *args, *kwargs.values()))
    if not -_MAX_PRECISION <= precision <= _MAX_PRECISION:
        raise BudgetExceeded(f"it rounds to more than {_MAX_PRECISION} digits")


def json_layout(budget: Budget, value: Any, size: int, indent: Any, separators: Any) -> None:
    """Blanks and separators of JSON, for a value of this size as `Budget.walk` counts it."""
    num_items = 1 + size // 4
    if indent is not None:
        margin = len(indent) if isinstance(indent, str) else max(indent, 0)
        if margin > _MAX_INDENT:
            raise BudgetExceeded(f"it indents JSON by more than {_MAX_INDENT} characters")
        budget.make(num_items * (1 + margin * nesting(value)))
    if separators is not None:
        budget.make(num_items * sum(map(len, separators)))


def check_path(attribute: object) -> None:
    """Refuse a path of attributes ("a.b.c") that is longer than any that leads somewhere."""
    if isinstance(attribute, str) and len(attribute) > _MAX_PATH_CHARS:
        raise BudgetExceeded(f"it takes an attribute whose name has {len(attribute)} characters")
