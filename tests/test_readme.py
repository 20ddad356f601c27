"""What README.md tells people to type is tried: everything is run, or at least understood."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ksana.cli import replay
from ksana.cli.perf_flags import parse_flags as parse_perf_flags
from ksana.cli.settings import parse_flags
from simulations.__main__ import build_parser as simulations_parser
from tests.models_for_tests import smollm2_gguf
from tests.server.process import ENTRY_POINT, ServerProcess

README = (Path(__file__).parent.parent / "README.md").read_text()
MAKEFILE = (Path(__file__).parent.parent / "Makefile").read_text()

PYTHON = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SHELL = [
    line
    for block in re.findall(r"(?:^\n)((?:^ {4}.*\n(?:^\n(?= {4}))?)+)", README, re.MULTILINE)
    for line in textwrap.dedent(block).replace("\\\n", " ").splitlines()
    if line
]
"""Commands, one each, in indented blocks."""

PORT = "8000"
"""Where README.md says that the server is."""

PATIENCE_S = 150
"""Seconds on a machine busy with other things; what fills a context takes far longer."""


def commands(*start: str) -> list[list[str]]:
    words = [shlex.split(line, comments=True) for line in SHELL]
    return [command for command in words if tuple(command[: len(start)]) == start]


def test_every_snippet_is_of_a_kind_that_is_tried() -> None:
    kinds = [
        ("make",),
        ("ksana", "serve"),
        ("ksana", "check"),
        ("ksana", "replay"),
        ("ksana", "perf"),
        ("python", "-m", "simulations"),
        (".venv/bin/ksana", "chat"),
        ("curl",),
    ]
    assert sum(len(commands(*kind)) for kind in kinds) == len(SHELL), SHELL
    assert all(commands(*kind) for kind in kinds)
    assert len(PYTHON) == 2
    assert README.count("```") == 2 * len(PYTHON)


def test_targets_and_variables_of_make() -> None:
    for _, target, *variables in commands("make"):
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
        for variable in variables:
            assert re.search(rf"^{variable.partition('=')[0]} \?=", MAKEFILE, re.MULTILINE), variable


def test_flags_of_serve_and_check() -> None:
    for program, command, *arguments in [*commands("ksana", "serve"), *commands("ksana", "check")]:
        layer, _ = parse_flags(f"{program} {command}", "", arguments)
        assert "model" in layer


def test_flags_of_replay_perf_and_simulations() -> None:
    for _, _, *arguments in commands("ksana", "replay"):
        assert replay.build_parser().parse_strictly(arguments).DIR
    for _, _, *arguments in commands("ksana", "perf"):
        parse_perf_flags(arguments)
    for _, _, _, command, *arguments in commands("python", "-m", "simulations"):
        assert simulations_parser().parse_args([command, *arguments]).command == command


def test_flags_in_the_text_exist() -> None:
    help_text = subprocess.run(
        [*ENTRY_POINT, "serve", "--help"], capture_output=True, text=True, check=True
    ).stdout
    flags = set(re.findall(r"`(--[a-z-]+)", README))
    assert {"--kv-cache-memory", "--remote-cache-max-bytes", "--swa-eviction"} <= flags
    assert [flag for flag in flags if not re.search(rf"{flag}\b", help_text + "--config")] == []


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    smollm2_gguf()  # fetched before, or the test is skipped
    process = ServerProcess("smollm2-135m", "--port", "0", "--kv-cache-memory", "512MiB")
    yield process
    process.kill()


def run(command: list[str], typed: str = "", **environ: str) -> str:
    """What it prints, within the time that a person would wait."""
    started = time.monotonic()
    done = subprocess.run(
        command,
        input=typed,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", **environ},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    print(f"{command[0]}: {time.monotonic() - started:.1f} s")
    return done.stdout


@pytest.mark.slow
@pytest.mark.needs_program("curl", "curl")
def test_curl(server: ServerProcess) -> None:
    (line,) = [line for line in SHELL if line.startswith("curl ")]
    assert f":{PORT}/" in line
    answer = run(["sh", "-c", line.replace(f":{PORT}/", f":{server.port}/") + " --silent --show-error"])
    assert '"chat.completion"' in answer
    assert '"finish_reason":"stop"' in answer.replace(" ", "")


@pytest.mark.slow
def test_chat(server: ServerProcess) -> None:
    (command,) = commands(".venv/bin/ksana", "chat")
    typed = "Name three rivers.\n"
    assert run([*ENTRY_POINT, *command[1:]], typed, KSANA_PORT=str(server.port)).strip()


@pytest.mark.slow
def test_the_openai_client(server: ServerProcess) -> None:
    (snippet,) = [snippet for snippet in PYTHON if "openai" in snippet]
    assert f":{PORT}/" in snippet
    assert run([sys.executable, "-c", snippet.replace(f":{PORT}/", f":{server.port}/")]).strip()


@pytest.mark.slow
def test_the_script_without_a_server() -> None:
    smollm2_gguf()
    (snippet,) = [snippet for snippet in PYTHON if "LLM(" in snippet]
    assert "Paris" in run([sys.executable, "-c", snippet])
