"""Templates that try to reach Python, or to never end. Each must fail soon, or be harmless."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from ksana.errors import ModelLoadError, RequestError
from ksana.messages.requests import ChatMessage
from ksana.tokenizers.chat_template import ChatTemplate
from ksana.tokenizers.template_budget import MAX_CPU_S

MESSAGES = [ChatMessage(role="user", content="hi")]
GROW = "{% set ns = namespace(x=START) %}{% for i in range(60) %}BODY{% endfor %}{{ ns.x }}"


def grow(start: str, body: str) -> str:
    return GROW.replace("START", start).replace("BODY", body)


WHY = "it (takes|makes|formats|indents|rounds)|recursion depth|MAX_RANGE"
RUNAWAY = {
    "a long range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "filters": "{% for i in range(9**5) %}{% for j in range(9**5) if false %}{% endfor %}{% endfor %}",
    "lists of ranges": "{% for i in range(9**5) %}{% set x = range(9**5) | list %}{% endfor %}",
    "reversed ranges": "{% for i in range(9**5) %}{% set x = range(9**5) | reverse | list %}{% endfor %}",
    "membership": "{% for i in range(9**5) %}{% set x = 'a' in range(9**5) %}{% endfor %}",
    "string times number": "{{ 'a' * 10**9 }}",
    "list times number": "{% set x = [1] * 10**9 %}",
    "power": "{% set x = 10**(10**10) %}",
    "squares": grow("3", "{% set ns.x = ns.x * ns.x %}"),
    "doubled string": grow("'ab'", "{% set ns.x = ns.x + ns.x %}"),
    "doubled string, joined": grow("'ab'", "{% set ns.x = ns.x ~ ns.x %}"),
    "doubled string, captured": grow("'ab'", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "doubled list": grow("[1]", "{% set ns.x = ns.x + ns.x %}"),
    "list of itself twice": grow("[1]", "{% set ns.x = [ns.x, ns.x] %}"),
    "tuple of itself twice": grow("[1]", "{% set ns.x = (ns.x, ns.x) %}"),
    "dict of itself twice": grow("[1]", "{% set ns.x = dict(a=ns.x, b=ns.x) %}"),
    "views of itself": grow("[1]", "{% set d = {'a': ns.x} %}{% set ns.x = [d.values(), d.values()] %}"),
    "arguments": "{% macro f() %}{% set ns.x = varargs %}{% endmacro %}" + grow("[1]", "{{ f(ns.x, ns.x) }}"),
    "recursive macro": "{% macro f(n) %}{% if n %}{{ f(n-1) ~ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "endless block": "{% block a %}{{ self.a() }}{% endblock %}",
    "endless loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "wide format": "{{ '%1000000000d' % 1 }}",
    "wide format from an argument": "{{ '%*d' % (10**9, 1) }}",
    "wide str.format": "{{ '{:>1000000000}'.format(1) }}",
    "wide str.format from an argument": "{{ '{:>{}}'.format(1, 1000000000) }}",
    "replace": "{% set a = 'a' * 5000000 %}{{ a.replace('a', a) }}",
    "replace filter": "{% set a = 'a' * 5000000 %}{{ a | replace('a', a) }}",
    "join": "{% set a = 'a' * 5000000 %}{{ a.join(['x'] * 10000) }}",
    "join filter": "{{ (['x'] * 10000) | join('a' * 5000000) }}",
    "indent": "{{ 'a\nb' | indent(10**9) }}",
    "indented json": "{{ [1] | tojson(indent=10**9) }}",
    "round": "{{ 1.5 | round(10**9) }}",
    "slices": "{% set a = 'a' * 5000000 %}{% for i in range(9**5) %}{% set b = a[1:] %}{% endfor %}",
    "comparisons": "{% set a = 'a' * 9000000 %}{% set b = 'a' * 9000000 %}"
    "{% for i in range(9**5) %}{% if a == b %}{% endif %}{% endfor %}",
    "searches": "{% set a = 'a' * 9000000 %}{% for i in range(9**5) %}{{ 'b' in a }}{% endfor %}",
    "upper": "{% set a = 'a' * 9000000 %}{% for i in range(9**5) %}{% set b = a.upper() %}{% endfor %}",
    "static text": "{% set x %}{% for i in range(9**5) %}" + "y" * 99999 + "{% endfor %}{% endset %}",
    "characters": "{{ ('a' * 9000000) | unique | list | length }}",
    "sums of lists": "{{ ([[1] * 1000] * 1000) | sum(start=[]) }}",
    "a large integer": "{{ ('f' * 9000000) | int(base=16) }}",
    "json of a shared list": "{{ ([['a' * 1000] * 1000] * 1000) | tojson }}",
}


@pytest.mark.parametrize("template", RUNAWAY.values(), ids=RUNAWAY.keys())
def test_a_runaway_template_is_stopped(template: str) -> None:
    start_s = time.thread_time()
    with pytest.raises(RequestError, match=WHY) as refused:
        ChatTemplate(template, {}, "x").render(MESSAGES)
    assert refused.value.status == 400
    assert time.thread_time() - start_s < MAX_CPU_S + 1


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'] }}",
        "{{ raise_exception.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ self.__init__ }}",
        "{{ cycler.__init__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '{a.__class__}'.format_map({'a': 1}) }}",
        "{{ [1] | map(attribute='__class__') | list }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ messages[0].pop('role') }}",
        "{% set ns = namespace() %}{% set ns._Namespace__attrs = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{{ (1).to_bytes(100000000) }}",
        "{{ 'a'.center(10**9) }}{{ 'a'.encode() }}",
        "{{ lipsum() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends 'x' %}",
        "{{ context }}{{ environment }}",
        "{% set ns = namespace(x=1) %}{% set ns.x = ns %}{{ ns }}",
    ],
)
def test_python_is_out_of_reach(template: str) -> None:
    try:
        text = ChatTemplate(template, {}, "x").render(MESSAGES)
    except RequestError:
        return
    assert text in ("", "[Undefined]", "<namespace>")


@pytest.mark.parametrize(
    "name", ["attr", "batch", "center", "pprint", "random", "slice", "urlize", "xmlattr"]
)
def test_costly_and_random_filters_do_not_exist(name: str) -> None:
    with pytest.raises(ModelLoadError, match=name):
        ChatTemplate("{{ 'a' | " + name + " }}", {}, "x")


def test_the_caller_s_messages_are_not_changed() -> None:
    message = ChatMessage(role="user", content="hi")
    ChatTemplate("{% for m in messages %}{% set m = 1 %}{% endfor %}", {}, "x").render([message])
    assert message.content == "hi"


def test_threads_do_not_share_a_budget() -> None:
    template = ChatTemplate(
        "{% for i in range(400) %}{% for j in range(1000) %}{% endfor %}{% endfor %}ok", {}, "x"
    )
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(template.render(MESSAGES))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["ok"] * 3


def test_ordinary_long_conversations_stay_far_below_the_limits() -> None:
    source = (Path(__file__).parents[1] / "data/tokenizers/long_template.jinja").read_text()
    messages = [ChatMessage(role=("user", "assistant")[i % 2], content="word " * 100) for i in range(2001)]
    text = ChatTemplate(source, {"bos_token": "<s>"}, "x").render(messages)
    assert text.count("<|im_start|>") == 2002
