"""The command: what goes wrong is one line and an exit code; only bugs give a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ksana.cli import main as cli
from ksana.cli.main import COMMANDS, Command, expected_cause, main
from ksana.errors import ConfigError, KsanaError, ModelLoadError


def failing_command(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    class Module:
        @staticmethod
        def run(_: list[str]) -> int:
            raise error

    monkeypatch.setitem(cli.COMMANDS, "fail", Command("fail", ""))
    monkeypatch.setattr(cli.importlib, "import_module", lambda _: Module)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a\n  b"), 2),
        (ModelLoadError("a b"), 3),
        (KsanaError("a b"), 1),
        (BaseExceptionGroup("g", [ExceptionGroup("g", [ModelLoadError("a b")])]), 3),
        (BaseExceptionGroup("g", [KeyboardInterrupt(), ModelLoadError("a b")]), 3),
    ],
)
def test_expected_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    failing_command(monkeypatch, error)
    assert main(["fail"]) == code
    assert capsys.readouterr() == ("", "ksana: a b\n")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BaseExceptionGroup("g", [KeyboardInterrupt()])])
def test_ctrl_c_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    failing_command(monkeypatch, error)
    assert main(["fail"]) == 130
    assert capsys.readouterr() == ("", "")


def test_bugs_are_seen_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_command(monkeypatch, ExceptionGroup("g", [ConfigError("x"), ValueError("y")]))
    with pytest.raises(ExceptionGroup):
        main(["fail"])
    assert expected_cause(ValueError()) is None


def test_unknown_and_missing_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sevre"]) == 2
    assert (
        capsys.readouterr().err == "ksana: unknown command 'sevre' (did you mean serve?); see ksana --help\n"
    )
    assert main([]) == 2
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("ksana ")
    assert "msgspec" in out


def test_every_command_has_help_and_no_torch() -> None:
    for name in COMMANDS:
        code = (
            "import sys; from ksana.cli.main import main\n"
            f"try: main([{name!r}, '--help'])\n"
            "except SystemExit as end: assert end.code == 0, end.code\n"
            "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert f"usage: ksana {name}" in done.stdout


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m ksana.cli.main --help | true"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
