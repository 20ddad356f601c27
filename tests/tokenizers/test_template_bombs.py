"""Templates without end are stopped, when they are loaded or rendered, in little time and memory."""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import pytest

from ksana.errors import ModelLoadError, RequestError
from ksana.messages.requests import ChatMessage
from ksana.tokenizers.chat_template import ChatTemplate
from ksana.tokenizers.template_budget import MAX_CPU_S
from tests.tokenizers.template_bombs import COMPILING, RENDERING

MESSAGES = [ChatMessage(role="user", content="hi")]
WHY = "it (takes|makes|formats|indents|rounds)|recursion depth|MAX_RANGE|a list is not safely|a date format"
_MAX_COMPILE_CPU_S = 10.0  # takes under 1.5 s where it was written
_MAX_MEMORY = 500 << 20

# The largest templates that pass the limits, of the kinds that cost the compiler most.
LARGEST = {
    "loops": "{% for a in b %}" * 19 + "{{a}}" * 9_900 + "{% endfor %}" * 19,
    "macros": "{% macro m() %}{{a()}}{% endmacro %}" * 2_000,
    "calls": "{{a()}}" * 6_500,
    "calls of macros": "{% call m() %}{{a}}{% endcall %}" * 2_200,
    "sums": ("{{ a" + "+a" * 90 + " }}") * 100,
    "filters": ("{{ a" + "|trim" * 90 + " }}") * 100,
    "a list": "{{ [" + "a," * 15_000 + "] }}",
    "names": "".join(f"{{%set a{i}=1%}}" for i in range(900)) + "{%if a%}{%set b=1%}{%endif%}" * 1_500,
    "scopes": "".join(f"{{%set a{i}=1%}}" for i in range(900))
    + "".join(f"{{%block b{i} scoped%}}{{{{f()}}}}{{%endblock%}}" for i in range(90)),
    "text": "x" * 399_999,
}


@pytest.mark.parametrize("kind", COMPILING)
def test_what_cannot_be_compiled_in_reasonable_time_is_refused_when_loading(kind: str) -> None:
    start_s = time.thread_time()
    with pytest.raises(ModelLoadError) as refused:
        ChatTemplate(COMPILING[kind], {}, "dir/model")
    assert time.thread_time() - start_s < _MAX_COMPILE_CPU_S
    assert str(refused.value).startswith("dir/model: the chat template is ")
    assert len(str(refused.value).splitlines()) == 1
    assert len(str(refused.value)) < 600


@pytest.mark.slow  # each a second or so
@pytest.mark.parametrize("kind", LARGEST)
def test_what_is_just_small_enough_is_compiled_in_reasonable_time(kind: str) -> None:
    start_s = time.thread_time()
    ChatTemplate(LARGEST[kind], {}, "x")
    assert time.thread_time() - start_s < _MAX_COMPILE_CPU_S


# They use up all their steps, a second or two.
LONG = (
    "attributes", "namespaces", "loop length", "memory of lists", "generators in generators", "empty macros",
    "colliding keys", "filtered loops",
)  # fmt: skip


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in LONG)) for kind in RENDERING]
)
def test_what_does_not_end_is_stopped_when_rendering(kind: str) -> None:
    template = ChatTemplate(RENDERING[kind], {}, "x")
    start_s = time.thread_time()
    with pytest.raises(RequestError, match=WHY) as refused:
        template.render(MESSAGES, date="2026-02-03T04:05:06")
    assert time.thread_time() - start_s < MAX_CPU_S + 1
    assert refused.value.status == 400
    assert len(refused.value.message) < 700


def test_a_bomb_harms_only_its_own_request() -> None:
    template = ChatTemplate(
        "{% if messages[0].content == 'x' %}{% for i in range(9**5) %}{% for j in range(9**5) %}{% endfor %}"
        "{% endfor %}{% endif %}ok",
        {},
        "x",
    )
    with pytest.raises(RequestError):
        template.render([ChatMessage(role="user", content="x")])
    assert template.render(MESSAGES) == "ok"


def run_all() -> None:
    """In a process of its own: all bombs one after the other; prints the memory that they took."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for source in (*COMPILING.values(), *LARGEST.values()):
        try:
            ChatTemplate(source, {}, "x")
        except ModelLoadError:
            continue
    for source in RENDERING.values():
        try:
            ChatTemplate(source, {}, "x").render(MESSAGES, date="2026-02-03T04:05:06")
        except RequestError:
            continue
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)


@pytest.mark.slow
def test_no_bomb_takes_much_memory() -> None:
    code = "from tests.tokenizers.test_template_bombs import run_all; run_all()"
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert int(child.stdout) < _MAX_MEMORY
