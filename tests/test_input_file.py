"""Files that people give."""

from __future__ import annotations

from pathlib import Path

import pytest

from ksana.errors import ConfigError
from ksana.input_file import read_input


def test_as_much_as_there_may_be_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert read_input(path, 100) == b"x" * 100
    with pytest.raises(ConfigError, match=r"^the list .*file is larger than 99 bytes$"):
        read_input(path, 99, f"the list {path}")


def test_memory_is_taken_for_the_limit_and_not_for_the_file() -> None:
    with pytest.raises(ConfigError, match=r"^/dev/zero is larger than 10 bytes$"):
        read_input(Path("/dev/zero"), 10)


@pytest.mark.parametrize(
    ("name", "why"), [("missing", "No such file"), (".", "Is a directory"), ("a\0b", "null")]
)
def test_what_cannot_be_read(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot be read: .*{why}"):
        read_input(tmp_path / name, 10)
