"""Log lines on stderr: time, level where it is not plain information, text."""

from __future__ import annotations

import logging
import sys
from typing import Literal


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return line if record.levelno == logging.INFO else f"{line[:8]} {record.levelname}:{line[8:]}"


def configure_logging(level: Literal["debug", "info", "warning", "error"]) -> None:
    """Send Ksana's own records of `level` and above to stderr, and other libraries' warnings.

    Other libraries tell of every connection at `info`, and at `debug` may write out whole requests.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("ksana").setLevel(level.upper())
