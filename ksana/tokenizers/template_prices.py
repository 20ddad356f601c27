"""What a template's operators and methods cost: paid before they work, as nothing can stop them then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2.runtime import LoopContext
from markupsafe import Markup

from ksana.tokenizers.template_budget import Budget
from ksana.tokenizers.template_formatting import pay_percent

ESCAPED = 6
"""Characters that one character may become in HTML, and more."""
CASED = 3
"""Characters that one character may become in another case."""
_CASE_METHODS = frozenset({"capitalize", "casefold", "lower", "swapcase", "title", "upper"})
_FROM_THE_END = frozenset({"rfind", "rindex", "rpartition", "rsplit"})
_STRIP = frozenset({"lstrip", "rstrip", "strip"})
_PADDING = frozenset({"center", "ljust", "rjust", "zfill"})


def pay_operator(budget: Budget, operator: str, left: Any, right: Any) -> None:
    """Pay for `left operator right`."""
    budget.step()
    for value in (left, right):
        if isinstance(value, int):
            budget.integer(value.bit_length())
    if operator == "+":
        pay_sum(budget, left, right)
    elif operator == "*":
        _pay_product(budget, left, right)
    elif operator == "%" and isinstance(left, str):
        pay_percent(budget, left, right)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        budget.integer(left.bit_length() * max(right, 0))
    elif operator == "-" and not isinstance(left, int | float):
        budget.read((left, right))  # differences of views of mappings


def pay_sum(budget: Budget, left: Any, right: Any) -> None:
    """Pay for `left + right`."""
    if isinstance(left, str) and isinstance(right, str):
        growth = ESCAPED if isinstance(left, Markup) or isinstance(right, Markup) else 1
        budget.make(growth * (len(left) + len(right)))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        budget.step(len(left) + len(right))


def _pay_product(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        budget.integer(left.bit_length() + right.bit_length())
    for value, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(value, str):
            budget.make(len(value) * max(times, 0))
        elif isinstance(times, int) and isinstance(value, list | tuple):
            budget.step(len(value) * max(times, 0))


def pay_replace(budget: Budget, text: str, old: str, new: str, count: int = -1) -> None:
    """Pay for `text.replace(old, new, count)`."""
    times = text.count(old) if old else len(text) + 1
    if 0 <= count < times:
        times = count
    growth = ESCAPED if isinstance(text, Markup) else 1
    budget.make(len(text) + growth * times * len(new))


def pay_method(
    budget: Budget, owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], size: int
) -> tuple[Any, ...]:
    """Pay for a method of a text, a list, a mapping or a loop; returns the arguments to call it with.

    `size` is that of all arguments, walked over.
    """
    if isinstance(owner, str):
        return _pay_str_method(budget, owner, name, args, kwargs, size)
    if not isinstance(owner, LoopContext):
        budget.make(size)  # an error may write the arguments out
        if name in ("copy", "count", "index"):
            budget.read((owner,))
    return args


def _pay_str_method(
    budget: Budget, owner: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], size: int
) -> tuple[Any, ...]:
    growth = ESCAPED if isinstance(owner, Markup) else 1
    first = args[0] if args else kwargs.get("sep", kwargs.get("tabsize"))
    budget.make((CASED if name in _CASE_METHODS else 1) * len(owner) + growth * size)
    if name in _FROM_THE_END or name in _STRIP:
        budget.scan(len(owner), len(first) if isinstance(first, str) else 0)
    if name in ("split", "rsplit"):
        budget.pieces(owner, first if isinstance(first, str) else None)
    elif name == "splitlines":
        budget.lines(owner)
    elif name in _PADDING and isinstance(first, int):
        budget.make(max(first, 0))
    elif name == "expandtabs":
        budget.make(owner.count("\t") * max(first if isinstance(first, int) else 8, 0))
    elif name == "replace" and len(args) > 1 and isinstance(first, str) and isinstance(args[1], str):
        pay_replace(budget, owner, *args)
    elif name == "join" and len(args) == 1:
        parts = list(budget.each(first))
        size = budget.read(parts)
        budget.make(growth * size + len(owner) * len(parts))
        return (parts,)
    return args
