"""What a template can reach: attributes per type, and what may be called. Lists of what is allowed.

A type that is not listed has no attributes, whatever it is; what is looked up in a list, a mapping or a
namespace must be data or a macro, so a function that got into one is not reachable through it. All of this
narrows the checks of Jinja's sandbox and replaces none of them.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import BlockReference, LoopContext, Macro, Undefined
from jinja2.utils import Cycler, Joiner, Namespace
from markupsafe import Markup

from ksana.tokenizers.template_formatting import FormatMethod

_STR_METHODS = """
    capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha isascii
    isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower
    lstrip partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split
    splitlines startswith strip swapcase title upper zfill
"""
_LOOP = """
    changed cycle depth depth0 first index index0 last length nextitem previtem revindex revindex0
"""
_SEQUENCE_METHODS = frozenset({"copy", "count", "index"})


@dataclass(frozen=True, slots=True, eq=False)
class TemplateFunction:
    """A function that is there for templates to call: the only kind of function they can call."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class TemplateNamespace(Namespace):
    """Jinja's `namespace`, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # Jinja's own signature: `self` may be an attribute
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        Namespace.__setitem__(self, name, value)

    def __repr__(self) -> str:
        return "<namespace>"  # not its content, which nobody has measured


def _refuse_private(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {str(name)[:100]!r}")


_ATTRIBUTES: dict[type, frozenset[str]] = {
    str: frozenset(_STR_METHODS.split()),
    Markup: frozenset(_STR_METHODS.split()),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: _SEQUENCE_METHODS,
    tuple: _SEQUENCE_METHODS,
    float: frozenset({"is_integer"}),
    range: frozenset({"count", "index", "start", "stop", "step"}),
    LoopContext: frozenset(_LOOP.split()),
    Macro: frozenset({"arguments", "caller", "catch_kwargs", "catch_varargs", "name"}),
    BlockReference: frozenset({"super"}),
    Cycler: frozenset({"current", "next", "reset"}),
}
_DATA: frozenset[type] = frozenset(
    {
        type(None), bool, int, float, complex, str, Markup, list, tuple, dict, range, set, frozenset,
        type({}.keys()), type({}.values()), type({}.items()),
        types.GeneratorType,  # what filters return; it has no attributes here
        TemplateNamespace, LoopContext, Macro, BlockReference, Cycler, Joiner,
    }
)  # fmt: skip
_CALLABLE: frozenset[type] = frozenset(
    {TemplateFunction, FormatMethod, Macro, BlockReference, LoopContext, Joiner}
)


def is_listed_attribute(obj: object, name: str) -> bool:
    """Whether objects of this type have this attribute for a template."""
    kind = type(obj)
    if kind is TemplateNamespace:
        return True  # those that begin with an underscore cannot be stored
    if issubclass(kind, tuple) and kind is not tuple:  # the groups of `groupby`
        return name in _SEQUENCE_METHODS or name in getattr(kind, "_fields", ())
    return name in _ATTRIBUTES.get(kind, ())


def is_reachable(value: object, owner: object) -> bool:
    """Whether a template may have what it looked up in `owner`: data, or one of the owner's own methods."""
    if type(value) in _DATA or isinstance(value, Undefined | tuple):
        return True
    if isinstance(value, types.BuiltinMethodType | types.MethodType):
        return value.__self__ is owner
    return type(value) is FormatMethod and value.text is owner


def is_listed_callable(obj: object) -> bool:
    """Whether a template may call this: a macro, a function made for it, a listed method."""
    if type(obj) in _CALLABLE or isinstance(obj, Undefined):  # to call what is undefined is an error
        return True
    if type(obj) is types.BuiltinMethodType:
        return is_listed_attribute(obj.__self__, obj.__name__)
    if type(obj) is types.MethodType:
        name = obj.__func__.__name__
        return is_listed_attribute(obj.__self__, name) and obj.__func__ is getattr(
            type(obj.__self__), name, None
        )
    return False
