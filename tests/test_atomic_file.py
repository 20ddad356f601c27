from __future__ import annotations

import os
from pathlib import Path

import pytest

from ksana.atomic_file import write_atomically


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "f"
    for content in (b"one", b"another"):
        write_atomically(file, content)
        assert file.read_bytes() == content
    assert os.listdir(tmp_path) == ["f"]
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "f")
    write_atomically(tmp_path / "link", b"one")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "f").read_bytes() == b"one"


def test_what_is_no_file_is_left_alone(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"):
        write_atomically(pipe, b"one")
    assert pipe.is_fifo()
    with pytest.raises(OSError, match=r"not a regular file|directory"):
        write_atomically(tmp_path, b"one")
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_failure_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f"
    write_atomically(file, b"one")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, b"another")
    assert file.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["f"]
