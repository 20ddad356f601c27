"""A Jinja environment for chat templates from outside: no Python objects within reach, and bounded work.

The template is rewritten before it is compiled so that everything that can repeat, grow or compare values
goes through the budget: loops, calls, operators, concatenations, slices, literals, comparisons, filters,
tests and output. What can be reached is listed, not what cannot: methods per type, filters, globals.

Bounded: number of steps, characters made, size of integers, CPU time (`ksana.tokenizers.template_budget`),
depth of recursion (Python's own limit). Not bounded by number: work between two loop turns or calls, which
is at most the template's length times one operation on the longest string.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import ext, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from ksana.tokenizers import template_filters
from ksana.tokenizers.template_budget import Budget

_STR_METHOD_NAMES = """
    capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit islower
    isnumeric isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind
    rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper
"""
_STR_METHODS = frozenset(_STR_METHOD_NAMES.split())
_STEPS_PER_CALL = 5
"""A macro's call takes about as long as this many turns of a loop."""
_MAPPING_METHODS = frozenset({"get", "items", "keys", "values"})
_SEQUENCE_METHODS = frozenset({"count", "index"})


class GenerationBlock(ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what to train on; here it is just its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
        raise SecurityError(f"a namespace cannot have an attribute {name!r}")


class Metering(NodeTransformer):
    """Puts the internal filters `_iterate`, `_turn`, `_concat`, `_walk` and `_slice` where work can grow."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_iterate")
        node.body.insert(0, nodes.ExprStmt(_filtered(nodes.Const(None), "_turn")))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes), "_concat")

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return _filtered(self.generic_visit(node), "_walk")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return _filtered(self.generic_visit(node), "_walk")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_walk") if node.ctx == "load" else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, "_walk")
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, "_walk")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node.node, "_slice")
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data)  # so that it passes through `finalize` like any other output


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment. Renderings in several threads have a budget each."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing is computed while compiling, where no budget holds
            extensions=[GenerationBlock, ext.loopcontrols],
        )
        self._local = threading.local()
        metered = template_filters.MeteredFunctions(lambda: self.budget, self)
        self.filters.clear()
        self.filters.update(metered.filters())
        self.tests.update(metered.tests())
        self._format, self._join, self._replace = metered.check_format, metered.join, metered.replace
        for name in ("lipsum",):
            del self.globals[name]
        self.globals.update(
            {"namespace": TemplateNamespace, "raise_exception": _raise_exception, "dict": _make_dict}
        )

        @pass_context
        def finalize(_context: Context, value: Any) -> Any:
            self.budget.make(self.budget.walk(value))
            return value

        self.finalize = finalize

    @property
    def budget(self) -> Budget:
        budget = getattr(self._local, "budget", None)
        assert isinstance(budget, Budget), "a template is rendered without a budget"
        return budget

    def start(self) -> None:
        """Give this thread a new budget: call before each rendering."""
        self._local.budget = Budget()

    def _generate(self, source: nodes.Template, name: Any, filename: Any, defer_init: bool = False) -> str:
        return super()._generate(Metering().visit(source), name, filename, defer_init)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr.startswith("_"):
            return False
        if isinstance(obj, str):
            return attr in _STR_METHODS
        if isinstance(obj, Mapping):
            return attr in _MAPPING_METHODS
        if isinstance(obj, list | tuple):
            return attr in _SEQUENCE_METHODS or attr in getattr(obj, "_fields", ())
        return isinstance(obj, Namespace | LoopContext | Macro) or not callable(value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        safe_format = super().wrap_str_format(value)
        if safe_format is None:
            return None
        template = value.__self__

        def checked(*args: Any, **kwargs: Any) -> str:
            self._format(template)
            return safe_format(*args, **kwargs)

        return checked

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = __self.budget
        budget.step(_STEPS_PER_CALL)
        num_chars = budget.walk(args) + budget.walk(kwargs)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            if __obj.__name__ == "join":
                (values,) = args
                return __self._join(values, owner)
            if __obj.__name__ == "replace":
                return __self._replace(owner, *args, **kwargs)
            budget.make(2 * len(owner) + num_chars)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = self.budget
        budget.step()
        if operator == "+":
            _price_sum(budget, left, right)
        elif operator == "*":
            _price_product(budget, left, right)
        elif operator == "%" and isinstance(left, str):
            self._format(left)
            budget.make(len(left) + budget.walk(right))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            budget.integer(left.bit_length() * max(right, 0))
        return super().call_binop(context, operator, left, right)


def _price_sum(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, str) and isinstance(right, str):
        budget.make(len(left) + len(right))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        budget.step(len(left) + len(right))


def _price_product(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        budget.integer(left.bit_length() + right.bit_length())
    for value, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(value, str):
            budget.make(len(value) * max(times, 0))
        elif isinstance(times, int) and isinstance(value, list | tuple):
            budget.step(len(value) * max(times, 0))


def _raise_exception(message: str) -> None:
    raise TemplateError(str(message))


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)
