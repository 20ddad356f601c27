"""No template reaches Python: each attack ends as it should, and nothing but the template runs meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ksana.errors import ModelLoadError, RequestError
from ksana.messages.requests import ChatMessage
from ksana.tokenizers.chat_template import ChatTemplate
from tests.tokenizers.template_attacks import ERROR, INVALID, KINDS

ATTACKS = [(kind, template) for kind, templates in KINDS.items() for template in templates]
_FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess",
    "open",
    "socket",
    "ctypes",
    "pty",
)
_watched: list[str] | None = None


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if _watched is None or not event.startswith(_FORBIDDEN):
        return
    if not str(args[0] if args else "").endswith((".py", ".pyc", "<template>")):  # of imports, of tracebacks
        _watched.append(event)


sys.addaudithook(_watch)


@pytest.fixture
def python_events() -> Iterator[list[str]]:
    """What Python reports of files, processes and sockets during a test."""
    global _watched
    outcome("{{ none.x }}")  # so that what Jinja imports for its first error is there
    _watched = events = []
    yield events
    _watched = None


def outcome(template: str) -> str:
    try:
        compiled = ChatTemplate(template, {"bos_token": "<s>"}, "x")
    except ModelLoadError:
        return INVALID
    try:
        return compiled.render([ChatMessage(role="user", content="hi")], date="2026-02-03T04:05:06")
    except RequestError as error:
        return ERROR if error.status == 400 else f"status {error.status}"


def test_there_are_hundreds_of_them() -> None:
    assert len(ATTACKS) >= 300


@pytest.mark.parametrize(("kind", "template"), ATTACKS)
def test_an_attack_ends_as_it_should(kind: str, template: str, python_events: list[str]) -> None:
    got = outcome(template)
    assert (got, python_events) == (KINDS[kind][template], [])


def test_the_watch_sees_what_it_should(python_events: list[str]) -> None:
    (Path(__file__).parents[1] / "data/chat_templates/README.md").read_bytes()
    assert python_events == ["open"]


def test_functions_and_objects_of_the_host_are_out_of_reach(python_events: list[str]) -> None:
    """Nothing puts them there; were it otherwise, a template could still not use them."""
    sandbox = ChatTemplate("", {}, "x")._sandbox

    class Host:
        secret = "s3cret"

        def method(self) -> str:
            return "called"

    names = {"host": Host(), "d": {"f": len, "m": Host().method, "h": Host()}, "f": len, "h": Host}
    for template in (
        "{{ host.secret }}{{ d.h }}{{ d.f }}{{ d['m'] }}{{ f.__self__ }}{{ h.secret }}{{ d.h.secret }}",
        "{{ d.f('abc') }}",
        "{{ d['m']() }}",
        "{{ f('abc') }}",
        "{{ h().method() }}",
        "{{ host.method() }}",
        "{{ host }}",
        "{{ d.values()|list }}",
        "{{ (d.values()|list)[0]('abc') }}",
        "{{ d|tojson }}",
        "{{ d|map(attribute='f')|list }}{{ [d]|map(attribute='f')|first is defined }}",
    ):
        sandbox.start()
        try:
            text = sandbox.from_string(template).render(names)
        except Exception:
            continue
        assert text in ("", "[Undefined, Undefined, Undefined]False")
    assert python_events == []
