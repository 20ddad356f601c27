"""Lines of a recorded workload: bounded, numbered, and named where they are wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from ksana.errors import ConfigError

MAX_LINE_BYTES = 16 << 20
"""A line of a million token ids is some 7 MB."""

MAX_TOKENS = 1 << 22
"""Tokens of one prompt or one answer."""

Read = TypeVar("Read")


class Line:
    """One line of a file and where it is. `text` is without the line's end."""

    __slots__ = ("number", "path", "text")

    def __init__(self, path: Path, number: int, text: bytes) -> None:
        self.path = path
        self.number = number
        self.text = text

    def wrong(self, what: object) -> ConfigError:
        return ConfigError(f"{self.path}, line {self.number}: {what}")


def read_lines(path: Path) -> Iterator[Line]:
    """Lines that are not empty, counted from 1. Raises ConfigError: unreadable, or a line too long."""
    try:
        with path.open("rb") as file:
            number = 0
            while text := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                line = Line(path, number, text.strip())
                if len(text) > MAX_LINE_BYTES:
                    raise line.wrong(f"longer than {MAX_LINE_BYTES >> 20} MiB")
                if line.text:
                    yield line
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None


def read_json_lines(path: Path, kind: type[Read]) -> Iterator[tuple[Line, Read]]:
    """Each line and what it says. Raises ConfigError, with the line, for what is no JSON of that kind."""
    decoder = msgspec.json.Decoder(kind)
    for line in read_lines(path):
        try:
            read = decoder.decode(line.text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise line.wrong(error) from None
        yield line, read


class Arrivals:
    """Checks that a file's times are times, and in order."""

    def __init__(self) -> None:
        self._last_s = -math.inf

    def check(self, line: Line, arrival_s: float) -> float:
        if not math.isfinite(arrival_s) or arrival_s < 0:
            raise line.wrong(f"no request can arrive at {arrival_s:g} s")
        if arrival_s < self._last_s:
            raise line.wrong("arrives before the request above it; sort the file by arrival")
        self._last_s = arrival_s
        return arrival_s


def check_lengths(line: Line, **lengths: int) -> None:
    """Raises ConfigError, with the line and the field, for a length that no prompt or answer has."""
    for field, length in lengths.items():
        if not 1 <= length <= MAX_TOKENS:
            raise line.wrong(f"{field} is {length}, not from 1 to {MAX_TOKENS:,}")
