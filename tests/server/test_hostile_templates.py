"""A server with a template from outside: an attack is a 400 for its request, a bomb one line at start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.conftest import Serve
from tests.server.test_start_errors import refused

pytestmark = pytest.mark.slow

ESCAPE = (
    "{{ (messages|map('upper')).gi_frame.f_builtins['eval']"
    "(\"__import__('pathlib').Path('CANARY').touch()\") }}"
)
TEMPLATE = (
    "{% if 'escape' in messages[0].content %}ESCAPE{% endif %}"
    "{% if 'bomb' in messages[0].content %}{% for i in range(9**5) %}{% for j in range(9**5) %}{% endfor %}"
    "{% endfor %}{% endif %}{{ messages[0].content }}"
)


def test_an_attack_is_a_400_and_the_next_request_is_answered(serve: Serve, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE.replace("ESCAPE", ESCAPE.replace("CANARY", str(canary))))
    server = serve("--chat-template", str(file))
    with server.http() as http:
        for content, reason in (("escape", "gi_frame"), ("bomb", "it takes more than 1000000 steps")):
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
            answer = http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("chat_template_error", "messages")
            assert reason in error["message"]
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert not canary.exists()
    assert "Traceback" not in server.log


@pytest.mark.parametrize(
    "template", ["{{ " + "a<" * 100_000 + "a }}", "{{ " + "9" * 5_000 + " }}", "{% if %}", "{{a}}" * 70_000]
)
def test_a_template_that_cannot_be_compiled_is_one_line_at_start(
    serve: Serve, tmp_path: Path, template: str
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(template)
    line = refused(serve, "--chat-template", str(file), code=3)
    assert "the chat template is " in line
    assert len(line) < 800
