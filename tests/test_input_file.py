"""Files that people give."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ksana import input_file
from ksana.errors import ConfigError, ModelLoadError
from ksana.input_file import read_input


def test_as_much_as_there_may_be_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert read_input(path, 100) == b"x" * 100
    with pytest.raises(ConfigError, match=r"^the list .*file is larger than 99 bytes$"):
        read_input(path, 99, f"the list {path}")


def test_memory_is_taken_for_the_limit_and_not_for_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=r"sparse is larger than 10 bytes$"):
        read_input(path, 10)


def test_devices_sockets_and_links_to_them(tmp_path: Path) -> None:
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for name, why in (
            ("zero", "it is a device"),
            ("loop", "Too many levels of symbolic links"),
            ("socket", "No such device or address"),
        ):
            with pytest.raises(ConfigError, match=f"{name} cannot be read: {why}"):
                read_input(tmp_path / name, 10)
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    assert read_input(tmp_path / "link", 10) == b"text"


def test_pipes_do_not_hold_anybody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert read_input(fifo, 10) == b""  # nobody writes
    with pytest.raises(ModelLoadError, match="fifo cannot be read: it is a pipe"):
        read_input(fifo, 10, error=ModelLoadError, pipes=False)
    reader, writer = os.pipe()
    with open(reader, closefd=True), open(writer, "wb", buffering=0) as pipe:
        pipe.write(b"key\n")
        monkeypatch.setattr(input_file, "PIPE_TIMEOUT_S", 0.05)
        with pytest.raises(ConfigError, match="cannot be read: nothing came"):
            read_input(Path(f"/dev/fd/{reader}"), 10)
        pipe.write(b"key\n")
        pipe.close()
        assert read_input(Path(f"/dev/fd/{reader}"), 10) == b"key\n"


@pytest.mark.parametrize(
    ("name", "why"), [("missing", "No such file"), (".", "it is a directory"), ("a\0b", "null")]
)
def test_what_cannot_be_read(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot be read: .*{why}"):
        read_input(tmp_path / name, 10)
