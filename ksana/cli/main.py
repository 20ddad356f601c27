"""The `ksana` command: finds the subcommand, and turns what goes wrong into one line and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong flags or files, 3 the model cannot be loaded, 130 stopped by Ctrl-C.
Subcommands are imported when they are called, so that `ksana version` does not wait for the others.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from ksana.errors import ConfigError, KsanaError
from ksana.setting_fields import nearest
from ksana.shown import one_line


class Command(NamedTuple):
    module: str
    """Has `run(argv) -> exit code`."""
    summary: str


COMMANDS = {
    "serve": Command("ksana.cli.serve", "serve a model over an OpenAI-compatible API"),
    "chat": Command("ksana.cli.chat", "talk to a running server in the terminal"),
    "check": Command(
        "ksana.cli.check", "say what `serve` would load, and whether it fits, without loading it"
    ),
    "replay": Command("ksana.cli.replay", "say again what a journal has recorded, and tell what differs"),
    "perf": Command("ksana.cli.perf", "measure steps without serving, and fit cost models"),
    "version": Command("ksana.cli.version", "print the versions of Ksana and what it stands on"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has left, as `head` does. Nothing more can be said there, and the
        # interpreter must not try again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except BaseException as error:
        cause = expected_cause(error)
        if isinstance(cause, KeyboardInterrupt):
            return 130
        if cause is None:
            raise
        print(f"ksana: {one_line(str(cause))}", file=sys.stderr)
        return cause.exit_code
    return code


def expected_cause(error: BaseException) -> KsanaError | KeyboardInterrupt | None:
    """The one failure that `error` stands for, if it is of the kinds that need no traceback.

    trio wraps what a task raises in exception groups; cancelled siblings add nothing. A group that also
    holds a failure of another kind is a bug to be seen whole, so it gives None.
    """
    if isinstance(error, KsanaError | KeyboardInterrupt):
        return error
    if not isinstance(error, BaseExceptionGroup):
        return None
    causes = [expected_cause(inner) for inner in error.exceptions]
    if any(cause is None for cause in causes):
        return None
    return next((cause for cause in causes if isinstance(cause, KsanaError)), causes[0])


def usage() -> str:
    lines = [f"  {name:<9} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: ksana COMMAND ...",
            "",
            "Ksana serves large language models.",
            "",
            *lines,
            "",
            "`ksana COMMAND --help` tells more. To begin: ksana serve smollm2-135m",
        ]
    )


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    name = "version" if arguments[0] == "--version" else arguments[0]
    command = COMMANDS.get(name)
    if command is None:
        raise ConfigError(f"unknown command {name[:80]!r}{nearest(name, COMMANDS)}; see ksana --help")
    code: int = importlib.import_module(command.module).run(arguments[1:])
    return code


if __name__ == "__main__":
    sys.exit(main())
