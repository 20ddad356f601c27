"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import re

MAX_BYTES = 1 << 50
"""More than any memory or disk of a server has."""

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_BYTES = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,6}))? ?(?:([kmgt])(i?))?b?", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str) -> int:
    """Bytes that `text` stands for: `4096`, `512MiB`, `1.5GiB` (powers of 1024), `2GB` (powers of 1000).

    A bare unit letter (`2G`) is a power of 1024, as for most programs with a memory option. A fraction
    of a byte is dropped. Raises ValueError that says what is accepted.
    """
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text[:40]!r} is not a size in bytes, such as 4096, 512MiB or 1.5GiB")
    whole, fraction, unit, binary = match[1], match[2] or "", (match[3] or "").lower(), match[4]
    decimal = unit != "" and not binary and text.strip()[-1] in "bB"
    factor: int = (1000 if decimal else 1024) ** _UNITS[unit]
    return int(whole + fraction) * factor // int(10 ** len(fraction))


def format_bytes(num_bytes: int) -> str:
    """The size for people, in the largest binary unit that keeps it at 1 or more: `1.50 GiB`."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 4)
    size = num_bytes / 1024**power
    return f"{size:.{2 if size < 10 else 1 if size < 100 else 0}f} {' KMGT'[power]}iB"
