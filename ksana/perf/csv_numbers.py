"""Numbers out of CSV files that may hold anything."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path

from ksana.errors import ConfigError
from ksana.input_file import read_input

MAX_FILE_BYTES = 64 << 20
_MAX_VALUE = 1 << 30


def read_rows(path: Path, columns: tuple[str, ...]) -> list[tuple[float, ...]]:
    """Those columns of a CSV file as numbers, in order. Each at least 0."""
    header, lines = read_lines(path, columns)
    rows = []
    for number, line in lines:
        try:
            row = tuple(float(line[header[column]]) for column in columns)
        except (ValueError, IndexError):
            raise ConfigError(f"{path}, line {number}: expected numbers in {', '.join(columns)}") from None
        if not all(0 <= value < _MAX_VALUE for value in row):
            raise ConfigError(f"{path}, line {number}: a value is negative, not a number, or absurd")
        rows.append(row)
    return rows


def read_lines(path: Path, columns: Iterable[str]) -> tuple[Mapping[str, int], list[tuple[int, list[str]]]]:
    """Places of the columns in the header, and the other lines with their numbers. Raises ConfigError."""
    text = read_input(path, MAX_FILE_BYTES)
    try:
        lines = list(csv.reader(io.StringIO(text.decode("utf-8-sig"))))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: {error}") from None
    header = {name: index for index, name in enumerate(lines[0])} if lines else {}
    for column in columns:
        if column not in header:
            raise ConfigError(f"{path} has no column {column}")
    return header, [(number, line) for number, line in enumerate(lines[1:], 2) if line]
