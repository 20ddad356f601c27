"""What settings that are texts may hold. Each is a rule: whether a text will do, and what is said if not."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass

MAX_CHARS = 4096
"""Of any setting: as long as a path may be."""
MAX_FILE_NAME_BYTES = 255
MAX_NAME_CHARS = 256
MAX_KEY_CHARS = 1024

_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[!-.0-~]+/?", re.ASCII | re.IGNORECASE)
_STORE = re.compile(r"[a-z][a-z0-9+.-]{0,15}:.+", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class TextRule:
    """`allows` is asked for texts of 1 to MAX_CHARS printable characters; others never will do."""

    expected: str
    """What it must be, to follow "must be": `the path of a file`."""
    allows: Callable[[str], object] = bool
    is_path: bool = False
    """Whether a caller in the same process may give an `os.PathLike`."""

    def check(self, text: str) -> None:
        """Raises ValueError."""
        if not 0 < len(text) <= MAX_CHARS or not text.isprintable() or not self.allows(text):
            raise ValueError(self.expected)


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        labels = text.removesuffix(".").split(".")
        return len(text) <= 254 and all(map(_LABEL.fullmatch, labels)) and not labels[-1].isdigit()
    return True


def _is_path(text: str) -> bool:
    """Names of more bytes are errors of the system wherever they are looked at."""
    return all(len(part.encode()) <= MAX_FILE_NAME_BYTES for part in text.split("/"))


MODEL = TextRule(
    "a directory, a .gguf file or a name, in printable characters, none longer than 255 bytes",
    _is_path,
    is_path=True,
)
PATH = TextRule("a path of printable names of at most 255 bytes", _is_path, is_path=True)
NAME = TextRule(
    f"a name of 1 to {MAX_NAME_CHARS} printable characters",
    lambda text: len(text) <= MAX_NAME_CHARS and text == text.strip(),
)
SIZE = TextRule("a size in bytes")
KEY = TextRule(
    f"1 to {MAX_KEY_CHARS} letters, digits and signs that a header can carry, without spaces",
    re.compile(f"[!-~]{{1,{MAX_KEY_CHARS}}}").fullmatch,
)
HOST = TextRule("a name or an address to listen on, such as localhost, 127.0.0.1 or ::", _is_host)
ORIGIN = TextRule(
    "* or an origin such as https://example.org",
    lambda text: text in ("*", "null") or _ORIGIN.fullmatch(text),
)
# Which kinds of store there are, and how each is written, `ksana.stores` says before anything is loaded.
STORE = TextRule(
    "a store, such as file:///directory, redis://host:port/db or unix:///socket", _STORE.fullmatch
)
