"""Files for the owner alone, whatever the umask and whatever was there before."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from ksana.private_files import exposure, make_private_directories, open_private


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("umask")
def test_files_and_directories_have_their_mode_under_any_umask(tmp_path: Path) -> None:
    make_private_directories(tmp_path / "a" / "b" / "c")
    assert [mode(tmp_path / name) for name in ("a", "a/b", "a/b/c")] == [0o700] * 3
    path = tmp_path / "a" / "file"
    os.close(open_private(path, os.O_CREAT | os.O_WRONLY))
    assert mode(path) == 0o600
    make_private_directories(tmp_path / "a" / "b")  # there already


def test_a_file_that_is_there_is_tightened_and_a_directory_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    path.chmod(0o664)
    os.close(open_private(path, os.O_CREAT | os.O_RDWR))
    assert mode(path) == 0o600
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o755)
    make_private_directories(tmp_path / "shared" / "mine")
    assert (mode(tmp_path / "shared"), mode(tmp_path / "shared" / "mine")) == (0o755, 0o700)


def test_what_is_no_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for wrong in ("file", "file/below", "link"):
        with pytest.raises(OSError, match=r"exists|Not a directory"):
            make_private_directories(tmp_path / wrong)


@pytest.mark.parametrize(
    ("bits", "said"),
    [
        (0o700, None),
        (0o600, None),
        (0o755, "can be read by others on this machine (mode 0755)"),
        (0o770, "can be read and written by others on this machine (mode 0770)"),
        (0o720, "can be written by others on this machine (mode 0720)"),
        (0o711, "can be entered by others on this machine (mode 0711)"),
        (0o1777, "can be read and written by others on this machine (mode 1777)"),
    ],
)
def test_who_else_may_is_told(tmp_path: Path, bits: int, said: str | None) -> None:
    (tmp_path / "place").mkdir()
    (tmp_path / "place").chmod(bits)
    assert exposure(tmp_path / "place") == said
    assert exposure(tmp_path / "nowhere") is None


def test_another_owner_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1000)
    said = exposure(tmp_path)
    assert said == (f"belongs to another user (uid {uid})" if uid else None)
