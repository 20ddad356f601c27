"""What all tests share: a quiet environment, hypothesis profiles, skips that are counted or refused."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Iterator

# Before anything imports torch: its threads spin, which on a busy machine makes steps ten times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests reach nothing but this machine, and tqdm's bars of the hub's client are no test output.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import hypothesis
import pytest

STRICT = os.environ.get("KSANA_TEST_STRICT") == "1"

hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("strict", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("strict" if STRICT else "default")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "needs_program(program, package): skipped where the program is not installed; `package` is "
        "Debian's name for it. With KSANA_TEST_STRICT=1 such a test fails instead.",
    )
    config.stash[_WANTED] = {}
    # Run in the background of a script, we would hand on to every program here that it ignores Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_WANTED = pytest.StashKey[dict[str, int]]()
"""Tests skipped for want of a Debian package, by package."""


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Undo what a command run within a test has set up: its handler writes to a stderr that is closed soon,
    and every record of later tests would be reported as an error of its own."""
    loggers = [logging.getLogger(), logging.getLogger("ksana")]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        # pytest puts its own handlers there for each phase of a test; only what came meanwhile goes.
        logger.handlers[:] = [handler for handler in logger.handlers if handler in handlers]
    assert logging.root.manager.disable == logging.NOTSET, "a test has left logging switched off for all"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs_program"):
        program, package = marker.args
        if shutil.which(program) is None:
            reason = f"{program} is not installed (Debian package {package})"
            if STRICT:
                pytest.fail(reason, pytrace=False)
            wanted = item.config.stash[_WANTED]
            wanted[package] = wanted.get(package, 0) + 1
            pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """How many tests ran, and what was missing; pytest's own closing line follows."""
    stats = terminalreporter.stats
    num_ran = sum(len(stats.get(outcome, [])) for outcome in ("passed", "failed", "xfailed", "xpassed"))
    terminalreporter.write_line(f"{num_ran} tests ran, {len(stats.get('skipped', []))} were skipped")
    for package, count in sorted(config.stash[_WANTED].items()):
        terminalreporter.write_line(f"{count} of them for want of the Debian package {package}")
