"""How many multiprocessors devices have, as their makers state it."""

from __future__ import annotations

_PROCESSORS = {
    "RTX PRO 6000 Blackwell": 188,
    "RTX 5090": 170,
    "RTX 4090": 128,
    "RTX 4080": 76,
    "RTX 3090": 82,
    "RTX 6000 Ada": 142,
    "RTX A6000": 84,
    "L40S": 142,
    "L40": 142,
    "L4": 58,
    "A10G": 80,
    "A10": 72,
    "A40": 84,
    "A100": 108,
    "H100 PCIe": 114,
    "H100": 132,
    "H200": 132,
    "GH200": 132,
    "B200": 148,
}


def processors_of(device: str) -> int | None:
    """By the name its driver gives; None for one that is not known. The longest known name counts."""
    words = device.replace("-", " ").split()
    best = 0
    found = None
    for name, num in _PROCESSORS.items():
        parts = name.split()
        if len(parts) > best and any(
            words[start : start + len(parts)] == parts for start in range(len(words))
        ):
            best, found = len(parts), num
    return found
