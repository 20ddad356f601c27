"""What comes from outside, as a line shows it to people: short, printable, on one line."""

from __future__ import annotations

import os
import reprlib
from pathlib import Path

MAX_PATH_CHARS = 300
MAX_LINE_CHARS = 2000
_MAX_INT_BITS = 256

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlist, _SHORT.maxdict = 2, 80, 80, 4, 4


def shown(value: object) -> str:
    """A value as Python writes it, cut short: written out it may be far larger than it is."""
    if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
        return f"a number of more than {_MAX_INT_BITS} bits"
    return _SHORT.repr(value)


def shown_path(path: Path | str) -> str:
    """A path, cut in the middle if it is long."""
    text = os.fspath(path)
    if len(text) <= MAX_PATH_CHARS:
        return text
    half = (MAX_PATH_CHARS - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def one_line(text: str, max_chars: int = MAX_LINE_CHARS) -> str:
    """The text on one line of printable characters: spaces for line ends, escapes for what could move a
    terminal's cursor or cannot be written as UTF-8; cut when it is longer."""
    words = " ".join(text[: max_chars + 1].split())
    if len(text) > max_chars:
        words = words[: max_chars - 3] + "..."
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in words)
