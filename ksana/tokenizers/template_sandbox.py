"""A Jinja environment for chat templates from outside: no Python objects within reach, and bounded work.

It is Jinja's immutable sandbox, narrowed. A source and its tree are checked before code is made of them
(`template_limits`); the tree is rewritten so that everything that can repeat, grow or compare values goes
through the budget (`template_metering`, `template_prices`, `template_filters`); and what can be reached is
listed, not what cannot: attributes per type, functions, filters (`template_access`).

Bounded: size and depth of the template, number of steps, characters made, size of integers, CPU time
(`template_budget`), depth of recursion (Python's own limit). Not bounded by number: work between two loop
turns or calls, which is at most the template's length times one operation on the longest string.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import ext, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Cycler, Joiner, pass_context

from ksana.tokenizers import template_access as access
from ksana.tokenizers import template_prices as prices
from ksana.tokenizers.template_budget import Budget, BudgetExceeded
from ksana.tokenizers.template_filters import MeteredFunctions
from ksana.tokenizers.template_formatting import FormatMethod
from ksana.tokenizers.template_limits import check_source, check_tree
from ksana.tokenizers.template_metering import Metering

_STEPS_PER_CALL = 5
"""A macro's call takes about as long as this many turns of a loop."""
_MAX_KEY_BITS = 60
_JINJA_S_OWN = ("_loop_vars", "_block_vars", "caller")
"""Arguments that compiled templates add to calls."""


class GenerationBlock(ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what to train on; here it is just its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


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
        metered = MeteredFunctions(lambda: self.budget, self)
        self.filters.clear()
        self.filters.update(metered.filters())
        self.tests.clear()
        self.tests.update(metered.tests())
        self._iterate = metered.iterate
        functions: dict[str, Callable[..., Any]] = {
            "cycler": Cycler,
            "dict": self._make_dict,
            "joiner": Joiner,
            "namespace": access.TemplateNamespace,
            "raise_exception": self._raise_exception,
            "range": safe_range,
        }
        self.globals.clear()
        self.globals.update({name: access.TemplateFunction(f) for name, f in functions.items()})

        @pass_context  # so that nothing is written while compiling
        def finalize(_context: Context, value: Any) -> Any:
            self.budget.text(value)
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

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        check_source(self, source)
        tree = super()._parse(source, name, filename)
        check_tree(tree)
        return tree

    def _generate(self, source: nodes.Template, name: Any, filename: Any, defer_init: bool = False) -> str:
        return super()._generate(Metering().visit(source), name, filename, defer_init)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and access.is_listed_attribute(obj, attr)

    def is_safe_callable(self, obj: Any) -> bool:
        return access.is_listed_callable(obj) and super().is_safe_callable(obj)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.budget.step()
        return self._reachable(super().getattr(obj, attribute), obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, str | int):
            self.budget.step()
        else:  # it is hashed, and an error may write it out
            self.budget.make(self.budget.walk(argument))
        return self._reachable(super().getitem(obj, argument), obj, argument)

    def _reachable(self, value: Any, obj: Any, name: Any) -> Any:
        return value if access.is_reachable(value, obj) else self.unsafe_undefined(obj, str(name)[:100])

    def wrap_str_format(self, value: Any) -> FormatMethod | None:
        if super().wrap_str_format(value) is None:
            return None
        return FormatMethod(self, value.__self__, value.__name__ == "format_map")

    def call_filter(
        self,
        name: str,
        value: Any,
        args: Any = None,
        kwargs: Any = None,
        context: Any = None,
        eval_ctx: Any = None,
    ) -> Any:
        if name.startswith("_"):
            raise TemplateError(f"no filter is named {name[:100]!r}")
        return super().call_filter(name, value, args, kwargs, context, eval_ctx)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = __self.budget
        budget.step(_STEPS_PER_CALL)
        if not __self.is_safe_callable(__obj):
            raise SecurityError(f"a {type(__obj).__name__} is not safely callable")
        given = {name: value for name, value in kwargs.items() if name not in _JINJA_S_OWN}
        size = budget.walk(args) + budget.walk(given)
        if isinstance(__obj, LoopContext):
            args = tuple(map(__self._iterate, args))
        owner = getattr(__obj, "__self__", None)
        if owner is not None:
            args = prices.pay_method(budget, owner, __obj.__name__, args, given, size)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        prices.pay_operator(self.budget, operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _make_dict(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Item by item, without the integers that may be made to have equal hashes: they take for ever."""
        step = self.budget.step
        (source,) = args or ((),)
        pairs: Iterable[Any] = source.items() if isinstance(source, Mapping) else self._iterate(source)
        made: dict[Any, Any] = {}
        for key, value in pairs:
            step()
            if isinstance(key, int) and key.bit_length() > _MAX_KEY_BITS:
                raise BudgetExceeded(
                    f"it makes a mapping with an integer of {key.bit_length()} bits as a key"
                )
            made[key] = value
        return made | kwargs

    def _raise_exception(self, message: Any) -> None:
        self.budget.text(message)
        raise TemplateError(str(message))
