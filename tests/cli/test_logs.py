"""Log lines: which are shown, how they look, and that a test that sets them up leaves nothing behind."""

from __future__ import annotations

import logging
import re

import pytest

from ksana.cli.logs import configure_logging


def test_lines_and_levels(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    logging.getLogger("ksana.serve").info("one")
    logging.getLogger("ksana.serve").debug("never")
    logging.getLogger("ksana.serve").warning("two")
    logging.getLogger("httpx").info("never")
    logging.getLogger("httpx").warning("three")
    out, err = capsys.readouterr()
    assert out == ""
    time = r"[0-9]{2}:[0-9]{2}:[0-9]{2}"
    assert re.fullmatch(f"{time} one\n{time} WARNING: two\n{time} WARNING: three\n", err)


def test_what_the_test_before_set_up_is_gone() -> None:
    """Else records go to a stderr that was closed with that test."""
    handlers = logging.getLogger().handlers
    assert [type(handler) for handler in handlers if type(handler) is logging.StreamHandler] == []
    assert logging.getLogger("ksana").level == logging.NOTSET
