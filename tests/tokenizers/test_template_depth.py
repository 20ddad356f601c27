"""Chat templates that pile up filters or values cannot overflow the stack of the process.

What they would do cannot be caught, so each is rendered by a process of its own, which must end as it should.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
from ksana.errors import RequestError
from ksana.messages.requests import ChatMessage
from ksana.tokenizers.chat_template import ChatTemplate

def render():
    try:
        template = ChatTemplate(sys.argv[1], {}, "here")
        print(template.render([ChatMessage(role="user", content="a")]))
    except RequestError as error:
        print("refused:", error)

if sys.argv[2] == "main":
    render()
else:
    thread = threading.Thread(target=render)
    thread.start()
    thread.join()
"""
PILES = [
    "ns.g|map('upper')",
    "ns.g|select",
    "ns.g|reverse",
    "ns.g|unique",
    "[ns.g]|select",
    "[ns.g]",
    "[ns.g]|map('list')",
]
USES = [
    "{{ ns.g|list|length }}",
    "{% macro m() %}{% for x in ns.g %}.{% endfor %}{% endmacro %}{{ m()|length }}",
]


@pytest.mark.parametrize("where", ["main", "thread"])
@pytest.mark.parametrize("use", USES)
def test_piles_of_filters(use: str, where: str) -> None:
    for pile in PILES:
        template = (
            "{% set ns = namespace(g=['a']) %}{% for i in range(40000) %}"
            f"{{% set ns.g = {pile} %}}{{% endfor %}}{use}"
        )
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, template, where],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, (pile, done.stderr[-300:])
        assert done.stdout.strip() == "1" or done.stdout.startswith("refused: "), pile
