"""ksana's sandbox against plain Jinja: what both render is equal, and what one refuses the other does too.

But for what ksana refuses on purpose (`ksana.tokenizers.template_filters`, budgets, generators written out).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from jinja2 import Environment, Template

from ksana.tokenizers.template_filters import MeteredFunctions
from ksana.tokenizers.template_sandbox import TemplateSandbox
from tests.tokenizers.plain_jinja import plain_environment

PLAIN = plain_environment()
PLAIN.optimized = False  # which writes nothing for `{{ 0[1:] }}` and fails for `{% set a = 0 %}{{ a[1:] }}`
SANDBOX = TemplateSandbox()
FAILED = "FAILED"

VALUES = [
    "''", "'a'", "'Ab <c> & d'", "' x\\ny '", "'1'", "'12.5'", "'a,b,c'", "'ß'", "'<b>'|safe", "'<i>'|e",
    "0", "1", "-3", "2.5", "true", "false", "none", "[]", "[3, 1, 2]", "['b', 'a', 'B']", "[1, 'a']",
    "[[1, 2], [3, 4]]", "(1, 2)", "()", "{}", "{'b': 1, 'a': 2}", "{'a': {'b': 'c'}}", "range(3)",
    "[{'a': 2, 'b': 'y'}, {'a': 1, 'b': 'Y'}]", "missing_name", "{'a': 1}.items()", "{'a': 1}.keys()",
    "'ab'|list", "[1, 2]|map('string')", "[1, 0]|select", "[1, 2]|reverse", "[none, 1]",
    "['x', missing_name]",
]  # fmt: skip
FILTERS = [
    "abs", "capitalize", "count", "d('z')", "default('z')", "default('z', true)", "dictsort",
    "dictsort(by='value')", "dictsort(true)", "dictsort(reverse=true)", "e", "escape", "first", "float",
    "float(7.5)", "forceescape", "format('x')", "format(1)", "groupby('a')", "groupby('b')", "groupby(0)",
    "groupby('a', default=9)", "indent", "indent(2, true)", "indent('> ', blank=true)", "int", "int(7)",
    "int(base=16)", "int(7, 2)", "items", "join", "join(', ')", "join('<'|e)", "join(1)", "join('-', 'a')",
    "join(attribute='b')", "last", "length", "list", "lower", "map('upper')", "map('default', 'q')",
    "map(attribute='a')", "map(attribute='a', default=1)", "map(attribute='a.b')", "map(attribute=0)",
    "max", "max(attribute='a')", "min", "min(true)", "reject('none')", "reject", "rejectattr('a')",
    "rejectattr('a', 'eq', 1)", "replace('a', 'x')", "replace('', '-')", "replace('a', '<', 1)",
    "replace(1, 2)", "reverse", "round", "round(1)", "round(1, 'floor')", "round(-1, 'ceil')", "safe",
    "select('string')", "select('in', ['a', 1])", "select('>', 1)", "selectattr('a')",
    "selectattr('b', 'equalto', 'y')", "sort", "sort(true)", "sort(case_sensitive=true)",
    "sort(attribute='b')", "sort(attribute='b,a')", "string", "sum", "sum('a')",
    "sum(attribute='a', start=5)", "sum(start=[])", "sum(start=())", "sum(start='')", "title", "tojson",
    "tojson(indent=2)", "tojson(ensure_ascii=true)", "tojson(separators=(',', ':'))",
    "tojson(sort_keys=true)", "tojson(indent='--')", "trim", "trim('a')", "truncate(3)",
    "truncate(4, true, '!')", "truncate(1, leeway=0, end='')", "unique", "unique(true)",
    "unique(attribute='b')", "upper", "wordcount",
]  # fmt: skip
TESTS = [
    "boolean", "callable", "defined", "divisibleby 2", "divisibleby(0)", "eq 1", "equalto 'a'", "escaped",
    "even", "false", "float", "ge 1", "gt 1", "in [1, 'a', none]", "in 'abc'", "integer", "iterable",
    "le 1", "lower", "lt 1", "mapping", "ne 1", "none", "number", "odd", "sameas none", "sequence",
    "string", "true", "undefined", "upper", "filter", "test",
]  # fmt: skip
OPERATIONS = [
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "{a} / {b}", "{a} // {b}", "{a} % {b}", "{a} ** {b}",
    "{a} ~ {b}", "{a} == {b}", "{a} != {b}", "{a} < {b}", "{a} >= {b}", "{a} in {b}", "{a} not in {b}",
    "{a} and {b}", "{a} or {b}", "not {a}", "-{a}", "{a}[0]", "{a}[-1]", "{a}['a']", "{a}.a", "{a}[{b}]",
    "{a}[1:]", "{a}[::-1]", "{a}[:{b}]", "{a} if {b} else 0", "{a} if {b}", "[{a}, {b}]", "{{'k': {a}}}",
    "({a},)", "{a} < {b} < {a}",
]  # fmt: skip
METHODS = [
    "capitalize()", "casefold()", "center(9)", "center(9, '*')", "count('a')", "endswith('a')",
    "expandtabs(2)", "find('b')", "format(1, a=2)", "index('a')", "isalnum()", "isalpha()", "isdigit()",
    "isidentifier()", "islower()", "isprintable()", "isspace()", "istitle()", "isupper()",
    "join(['a', '<'])", "join([1])", "join('ab'|list|map('upper'))", "ljust(5, '<')", "lower()", "lstrip()",
    "lstrip('a')", "partition('b')", "removeprefix('a')", "removesuffix('a')", "replace('a', '<')",
    "replace('a', 'b', 1)", "rfind('a')", "rindex('a')", "rjust(5)", "rpartition('b')", "rsplit(',', 1)",
    "rstrip()", "split()", "split(',')", "split(',', 1)", "split(sep=',', maxsplit=1)", "splitlines()",
    "splitlines(true)", "startswith('a')", "startswith(('a', ' '))", "strip()", "strip('a ')", "swapcase()",
    "title()", "upper()", "zfill(5)", "get('a')", "get('z', 5)", "items()|list", "keys()|list",
    "values()|list", "copy()", "index(1)", "count(1)", "is_integer()",
]  # fmt: skip


def both(template: str) -> tuple[str, str]:
    return render(PLAIN, template), render(SANDBOX, template)


def render(environment: Environment, template: str | Template, **names: Any) -> str:
    if environment is SANDBOX:
        SANDBOX.start()
    try:
        compiled = environment.from_string(template) if isinstance(template, str) else template
        return compiled.render(names)
    except Exception:
        return FAILED


def fresh(value: str) -> Any:
    """The value of an expression, new each time: a generator can be used once."""
    return _expression(value)()


@functools.cache
def _expression(value: str) -> Any:
    return PLAIN.compile_expression(value, undefined_to_none=False)


def check(expression: str, values: Iterable[tuple[str, ...]]) -> None:
    """Render an expression of `a` and `b`, written, as JSON, and iterated over, for all values of these."""
    templates = (
        f"{{{{ {expression} }}}}|{{{{ ({expression}) is string }}}}",
        f"{{{{ {expression} }}}}",
        f"{{{{ [{expression}]|tojson }}}}",
        f"{{% for x in {expression} %}}{{{{ x }}}};{{{{ loop.last }}}}{{% endfor %}}",
    )
    for template in templates:
        plain, sandboxed = (_compiled(environment, template) for environment in (PLAIN, SANDBOX))
        for sources in values:
            names = dict(zip("ab", map(fresh, sources), strict=False))
            expected = render(PLAIN, plain, **names)
            got = render(SANDBOX, sandboxed, **dict(zip("ab", map(fresh, sources), strict=False)))
            if got == FAILED and any(isinstance(name, Iterator) for name in names.values()):
                continue  # Jinja writes the address of a generator
            if " at 0x" in expected:
                assert got == FAILED, (template, sources)
            else:
                assert got == expected, (template, sources)


def _compiled(environment: Environment, template: str) -> Template | str:
    try:
        return environment.from_string(template)
    except Exception:
        return template  # fails again when it is rendered


SINGLE = [(value,) for value in VALUES]


@pytest.mark.parametrize("filter_", FILTERS)
def test_filters(filter_: str) -> None:
    check(f"a|{filter_}", SINGLE)


@pytest.mark.parametrize(
    "filter_", ["list", "join", "first", "map('upper')|list", "select|list", "sum", "max"]
)
def test_filters_of_generators(filter_: str) -> None:
    for value in VALUES:
        expected, got = both(f"{{{{ ({value})|select|{filter_} }}}}")
        assert got == expected, value


def test_every_filter_and_test_is_compared() -> None:
    metered = MeteredFunctions(lambda: SANDBOX.budget, SANDBOX)
    names = {name for name in metered.filters() if not name.startswith("_")}
    assert names == {filter_.split("(")[0] for filter_ in FILTERS}
    words = {test.split("(")[0].split()[0] for test in TESTS}
    symbols = {"==", "!=", ">", ">=", "<", "<=", "greaterthan", "lessthan"}
    assert set(metered.tests()) == words | symbols


@pytest.mark.parametrize("test", TESTS)
def test_tests(test: str) -> None:
    check(f"a is {test}", SINGLE)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operators(operation: str) -> None:
    check(operation.format(a="a", b="b"), [(a, b) for a in VALUES for b in VALUES[::6]])


@pytest.mark.parametrize("method", METHODS)
def test_methods(method: str) -> None:
    check(f"a.{method}", SINGLE)


STATEMENTS = [
    "{{ {'b': 1, 'a': 2}|list }}{{ (range(2)|list) + [9] }}{{ (1, 2)|list }}{{ 'ab'|list }}",
    "{% set a = [1] %}{% set b = a|list %}{{ a is sameas b }}",
    "{% set g = [1, 2, 3]|map('string') %}{% for x in g %}{{ x }}{% break %}{% endfor %}{{ g|list }}",
    "{% set g = [1, 2, 3]|select %}{{ g|first }}{{ g|list }}",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "{% for x in [1, 2] %}{% generation %}{{ loop.index }}{{ x }}{% endgeneration %}{% endfor %}",
    "{% for x in 'abc' if x != 'b' %}{{ loop.index }}{{ loop.length }}{{ loop.previtem }}{{ x }}{% endfor %}",
    "{% for x in {'a': 1} %}{{ x }}{% endfor %}{% for x in [] %}{% else %}none{% endfor %}",
    "{% for x in [1, 1, 2] %}{{ loop.changed(x) }}{{ loop.cycle('a', 'b') }}{{ loop.revindex }}{% endfor %}",
    "{% for x in [[1, [2]], []] recursive %}[{{ loop(x) if x is iterable else x }}]{% endfor %}",
    "{% for x in range(5) if x %}{% if x == 3 %}{% continue %}{% endif %}{{ x }}{{ loop.last }}{% endfor %}",
    "{% macro m(a, b='x') %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, c=4) }}",
    "{% macro m() %}<{{ caller(1) }}>{% endmacro %}{% call(x) m() %}{{ x }}{% endcall %}",
    "{% macro m(n) %}{{ n }}{% if n %}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(3) }}{{ m.name }}",
    "{% set ns = namespace(a=1) %}{% for x in [1, 2] %}{% set ns.a = ns.a + x %}{% endfor %}{{ ns.a }}",
    "{% set ns = namespace({'a': 1}, b=2) %}{{ ns.a }}{{ ns['b'] }}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.current }}{{ c.next() }}{{ c.reset() }}{{ c.next() }}",
    "{% set j = joiner('; ') %}{{ j() }}a{{ j() }}b",
    "{{ dict(a=1, **{'b': 2}) }}{{ dict([['a', 1]]) }}{{ dict({'a': 1}, a=2) }}",
    "{% block a %}x{{ self.b() }}{% block b %}y{% endblock %}{% endblock %}",
    "{% filter upper|replace('A', 'b') %}a{{ 'c' }}{% endfilter %}{% set x|trim %} q {% endset %}{{ x }}",
    "{% with a = 1, b = 2 %}{{ a }}{{ b }}{% endwith %}{{ a is defined }}",
    "{% set a, b = 'xy' %}{{ a }}{{ b }}{% set c, d = {'a': 1, 'b': 2} %}{{ c }}{{ d }}",
    "{% if missing_name %}{% elif 0 %}{% elif '' %}{% else %}e{% endif %}{{ [].x is defined }}",
    "a\n  {% if true %}\n  b\n  {%- endif %}\n\n{{ 'c' -}}\n d {#- e -#} f\n",
    "{% raw %}{{ x }}{% endraw %}{# comment #}{{ '%' }}{{ '{%' }}",
    "{{ 'in 123456 %d%% of %s' % (3, 'y') }}{{ '%(a)5.2f|%(b)-4s|' % {'a': 1.5, 'b': 'z'} }}",
    "{{ '{0:>4}|{1:<4}|{a!r}|{{x}}'.format('x', 2, a='q') }}{{ '{:,} {:x}'.format(1234567, 255) }}",
    "{{ '{0[a]} {1[0]} {2.a}'.format({'a': 1}, [5], {'a': 7}) }}{{ '{a}'.format_map({'a': 1}) }}",
    "{{ '{:>{}}'.format('x', 5) }}{{ '%5.1f %c %x %e' % (1.25, 'a', 255, 12345.678) }}{{ '%s' % [1] }}",
    "{{ ('<a>'|safe) + '<b>' }}{{ ('%s'|safe) % '<' }}{{ ('{}'|safe).format('<') }}",
    "{{ '<'|e|e }}{{ '<'|e|upper }}{{ ('<'|e) ~ '<' }}{{ '<'|forceescape }}",
    "{{ [1, 2, 3][1:]|first }}{{ (1, 2, 3)[::-1] }}{{ 'abc'[-2:] }}{{ [[1, 2]][0][1] }}",
    "{{ 1 < 2 < 3 }}{{ 'a' in 'abc' and 1 not in [2] }}{{ 2 ** -1 }}{{ -3 // 2 }}{{ 7 % -3 }}{{ 10 / 4 }}",
    "{{ [3, 1]|sort|join }}{{ {'B': 1, 'a': 2}|dictsort }}{{ ([0.1] * 10)|sum }}",
    "{{ namespace is callable }}{{ range(3) is sequence }}{{ loop is defined }}{{ 'upper' is filter }}",
    "{{ ['a', 'b']|map('upper')|map('lower')|select('equalto', 'b')|list }}{{ [[1], [2]]|map('first')|sum }}",
    "{% for g, items in [{'a': 1}, {'a': 2}, {'a': 1}]|groupby('a') %}{{ g }}{{ items|length }}{% endfor %}",
    "{% for g in [{'a': 1}]|groupby('a') %}{{ g.grouper }}{{ g.list }}{{ g[0] }}{{ g }}{% endfor %}",
]


@pytest.mark.parametrize("template", STATEMENTS)
def test_statements(template: str) -> None:
    expected, got = both(template)
    assert expected != FAILED
    assert got == expected


LAZY = ("|map", "|select", "|reject", "|unique", "|items", "|reverse")
_values = st.sampled_from([value for value in VALUES if "|" not in value and "(" not in value])
_chains = st.lists(st.sampled_from([*(f"|{f}" for f in FILTERS), *(f".{m}" for m in METHODS)]), max_size=3)


@settings(max_examples=150, deadline=None)
@given(value=_values, chain=_chains, other=_values, operation=st.sampled_from(OPERATIONS))
@example(value="{'b': 1, 'a': 2}", chain=["|list"], other="[9]", operation="{a} + {b}")
def test_chains(value: str, chain: list[str], other: str, operation: str) -> None:
    expression = f"({value})"
    for link in chain:
        expression = f"({expression}{link})"
    both_set = f"{{% set a = {expression} %}}{{% set b = {other} %}}"  # Jinja computes with constants itself
    expected, got = both(f"{both_set}{{{{ {operation.format(a='a', b='b')} }}}}")
    # Jinja writes out addresses, and goes on with them; here what lazy filters make is not written out.
    is_lazy = any(link.startswith(LAZY) for link in chain)
    assert " at 0x" in expected.lower() or got == expected or (is_lazy and got == FAILED), expression


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(max_size=30),
    spec=st.text(alphabet="%sdrfxc0123 .+-#()a{}:<>^!*", max_size=12),
    number=st.integers(-(10**6), 10**6) | st.floats(allow_nan=False) | st.text(max_size=4),
)
def test_formats(text: str, spec: str, number: Any) -> None:
    assume(not re.search("[0-9]{6}", spec))  # plain Jinja would write out gigabytes
    names = {"text": text, "spec": spec, "number": number}
    for expression in ("spec % number", "spec % (number,)", "spec.format(number)", "spec % {'a': number}"):
        SANDBOX.start()
        try:
            expected = PLAIN.from_string(f"{{{{ {expression} }}}}{{{{ text|e }}}}").render(names)
        except Exception:
            continue
        try:
            got = SANDBOX.from_string(f"{{{{ {expression} }}}}{{{{ text|e }}}}").render(names)
        except Exception as error:
            assert "width or precision" in str(error)  # noqa: PT017
            continue
        assert got == expected
