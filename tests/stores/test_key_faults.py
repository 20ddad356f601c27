"""What stands in the place of one block or shard harms that key alone; a fault of the store is told as one.

Also: nothing below the root is followed out of it, and nothing waits.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from ksana.errors import RemoteCacheError
from ksana.stores import block_file, filesystem
from ksana.stores.envelope import DamagedValue, KeyFault
from ksana.stores.filesystem import FilesystemStore
from tests.stores.conftest import Directory, new_key

VALUE = b"v" * 1000


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return Directory(tmp_path / "cache")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "_SCAN_PATIENCE_S", 20.0)


async def put(store: FilesystemStore, key: bytes) -> None:
    await store.put(key, memoryview(VALUE))


async def get(store: FilesystemStore, key: bytes) -> bool:
    into = bytearray(len(VALUE))
    found = await store.get(key, memoryview(into))
    assert not found or into == VALUE
    return found


def other_shard(key: bytes) -> bytes:
    """A key of another shard."""
    while True:
        other = new_key()
        if other[0] != key[0]:
            return other


def a_directory(path: Path, _elsewhere: Path) -> None:
    path.mkdir(parents=True)


def a_full_directory(path: Path, _elsewhere: Path) -> None:
    path.mkdir(parents=True)
    (path / "file").write_text("x")


def a_file_for_the_shard(path: Path, _elsewhere: Path) -> None:
    path.parent.parent.mkdir(exist_ok=True, parents=True)
    path.parent.write_text("x")


def a_pipe_for_the_shard(path: Path, _elsewhere: Path) -> None:
    path.parent.parent.mkdir(exist_ok=True, parents=True)
    os.mkfifo(path.parent)


def a_link_for_the_shard(path: Path, elsewhere: Path) -> None:
    path.parent.parent.mkdir(exist_ok=True, parents=True)
    path.parent.symlink_to(elsewhere)


def a_link_to_nowhere_for_the_shard(path: Path, elsewhere: Path) -> None:
    path.parent.parent.mkdir(exist_ok=True, parents=True)
    path.parent.symlink_to(elsewhere / "nowhere")


def a_link_to_itself_for_the_shard(path: Path, _elsewhere: Path) -> None:
    path.parent.parent.mkdir(exist_ok=True, parents=True)
    path.parent.symlink_to(path.parent)


Obstacle = Callable[[Path, Path], None]
OBSTACLES: list[Obstacle] = [
    *(a_directory, a_full_directory, a_file_for_the_shard, a_pipe_for_the_shard),
    *(a_link_for_the_shard, a_link_to_nowhere_for_the_shard, a_link_to_itself_for_the_shard),
]


@pytest.mark.parametrize("max_bytes", [None, 1 << 20])
@pytest.mark.parametrize("obstacle", OBSTACLES)
async def test_what_cannot_become_a_block_is_the_keys_fault_alone(
    directory: Directory, tmp_path: Path, obstacle: Obstacle, max_bytes: int | None
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("mine")
    key = new_key()
    good = other_shard(key)
    obstacle(directory.path(key), elsewhere)
    store = FilesystemStore.open(str(directory.root), max_bytes=max_bytes)
    with trio.fail_after(10):
        for _ in range(3):
            with pytest.raises(KeyFault, match=key.hex()[:2]):
                await put(store, key)
            await put(store, good)
        assert await store.contains([key, good]) == [False, True]
        with contextlib.suppress(KeyFault):
            assert not await get(store, key)
        assert await get(store, good)
    assert list((directory.root / "tmp").iterdir()) == []
    assert sorted(elsewhere.iterdir()) == [elsewhere / "precious"]


@pytest.mark.parametrize("kind", ["pipe", "link", "link to itself", "device", "socket"])
async def test_what_can_be_replaced_is_and_is_never_read_or_waited_for(
    directory: Directory, tmp_path: Path, kind: str
) -> None:
    import socket

    key, path = new_key(), tmp_path / "outside"
    path.write_bytes(block_file.header(key, len(VALUE), bytes(32)) + VALUE)
    place = directory.path(key)
    place.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "socket":
        bound = socket.socket(socket.AF_UNIX)
        before = Path.cwd()
        os.chdir(place.parent)  # the name is too long for an address
        bound.bind(place.name)
        os.chdir(before)
    else:
        place.symlink_to({"link": path, "device": Path("/dev/zero")}.get(kind, place))
    before_put = path.read_bytes()
    store = FilesystemStore.open(str(directory.root), max_bytes=1 << 20)
    with trio.fail_after(10):
        assert await store.contains([key]) == [False]
        with pytest.raises(KeyFault):
            await get(store, key)
        await put(store, key)
        assert await get(store, key)
    assert path.read_bytes() == before_put
    assert not place.is_symlink()


def refusing(name: str, wanted: Callable[[str], bool], number: int, patch: pytest.MonkeyPatch) -> None:
    """`os.name` fails with errno `number` for paths that are wanted."""
    really: Any = getattr(os, name)

    def call(*arguments: Any, **more: Any) -> Any:
        paths = [str(argument) for argument in arguments if isinstance(argument, str | Path)]
        if any(map(wanted, paths)):
            raise OSError(number, os.strerror(number))
        return really(*arguments, **more)

    patch.setattr(os, name, call)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EXDEV, errno.EISDIR])
async def test_a_shard_that_may_not_be_used_is_the_fault_of_its_keys(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store, key = directory.open(), new_key()
    good = other_shard(key)
    await put(store, key)
    await put(store, good)
    shard = str(directory.path(key).parent)
    for name in ("open", "rename", "stat", "unlink"):
        refusing(name, lambda path: path.startswith(shard + "/"), number, monkeypatch)
    assert await store.contains([key, good]) == [False, True]
    for call in (put, get):
        with pytest.raises(KeyFault, match=os.strerror(number)):
            await call(store, key)
        await call(store, good)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE])
async def test_a_fault_of_the_store_is_one_wherever_it_shows(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store, key = directory.open(), new_key()
    await put(store, key)
    for name in ("open", "rename", "stat"):
        with monkeypatch.context() as patch:
            refusing(name, lambda path: str(directory.root) in path, number, patch)
            for call in (put, get):
                if (name, call) == ("rename", get):
                    continue
                with pytest.raises(RemoteCacheError, match=os.strerror(number)) as told:
                    await call(store, key)
                assert not isinstance(told.value, KeyFault | DamagedValue)
    assert await get(store, key)


async def test_a_root_that_may_not_be_entered_is_the_stores_fault(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = directory.open()
    for name in ("open", "stat", "rename"):
        refusing(name, lambda path: path.startswith(str(directory.root)), errno.EACCES, monkeypatch)
    for call in (put(store, new_key()), get(store, new_key()), store.contains([new_key()])):
        with pytest.raises(RemoteCacheError, match="Permission denied") as told:
            await call
        assert not isinstance(told.value, KeyFault)


async def test_scans_and_evictions_meet_odd_things_and_touch_none(
    directory: Directory, tmp_path: Path
) -> None:
    precious = tmp_path / "elsewhere"
    (precious / "ab").mkdir(parents=True)
    outside = precious / f"{'ab' * 33}.safetensors"
    for path in (outside, precious / "1-ab"):
        path.write_bytes(bytes(5000))
        os.utime(path, (1, 1))
    root = directory.root
    (root / "cd").mkdir(parents=True)
    (root / "ab").symlink_to(precious)  # a shard elsewhere, with what looks like a block
    (root / "tmp").symlink_to(precious)  # and what looks like an orphan
    os.mkfifo(root / "ef")
    os.mkfifo(root / "cd" / f"{'cd' * 33}.safetensors")
    (root / "cd" / f"{'cd' * 32}.safetensors").symlink_to(outside)
    (root / "cd" / f"{'cd' * 31}.safetensors").mkdir()
    store = FilesystemStore.open(str(root), max_bytes=3000)
    with trio.fail_after(10):
        with pytest.raises(RemoteCacheError, match="tmp in it is no directory"):
            await put(store, new_key())
        (root / "tmp").unlink()
        for _ in range(8):
            key = new_key()
            if key[0] not in (0xAB, 0xEF):
                await put(store, key)
    assert sorted(path.name for path in precious.iterdir()) == sorted(["ab", "1-ab", outside.name])
    assert len([path for path in root.rglob("*.safetensors") if path.is_file()]) <= 3 + 1


# for the owner alone


def modes(root: Path) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {"files": set(), "directories": {stat.S_IMODE(root.stat().st_mode)}}
    for path in root.rglob("*"):
        kind = "directories" if path.is_dir() else "files"
        found[kind].add(stat.S_IMODE(path.lstat().st_mode))
    return found


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777], ids=oct)
@pytest.mark.parametrize("is_there", [False, True])
async def test_files_and_directories_are_private_under_any_umask(
    directory: Directory, umask: int, is_there: bool
) -> None:
    if is_there:  # made by somebody else, for all to read
        directory.root.mkdir(parents=True)
        directory.root.chmod(0o755)
    before = os.umask(umask)
    try:
        store = FilesystemStore.open(str(directory.root), max_bytes=1 << 20)
        for _ in range(5):
            await put(store, new_key())
        if not is_there:
            shutil.rmtree(directory.root)  # made anew by the next write
            await put(store, new_key())
    finally:
        os.umask(before)
    root = {0o755} if is_there else {0o700}
    assert modes(directory.root) == {"files": {0o600}, "directories": {0o700} | root}


async def test_what_an_older_version_has_left_is_tightened(directory: Directory) -> None:
    store = directory.open()
    keys = [new_key() for _ in range(4)]
    for key in keys:
        await put(store, key)
    for path in directory.root.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    times = [directory.path(key).stat().st_mtime_ns for key in keys]
    again = FilesystemStore.open(str(directory.root), max_bytes=1 << 20)
    await put(again, new_key())
    assert modes(directory.root) == {"files": {0o600}, "directories": {0o700}}
    assert [directory.path(key).stat().st_mtime_ns for key in keys] == times


@pytest.mark.parametrize(("mode", "said"), [(0o755, "can be read by others"), (0o770, "read and written")])
def test_a_root_that_others_may_read_is_told_of_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, said: str
) -> None:
    root = tmp_path / "shared"
    root.mkdir()
    root.chmod(mode)
    FilesystemStore.open(str(root), max_bytes=None)
    (line,) = caplog.messages
    assert said in line
    assert f"mode {mode:04o}" in line
    assert "chmod 700" in line
    assert stat.S_IMODE(root.stat().st_mode) == mode, "it is somebody else's to decide"
    caplog.clear()
    FilesystemStore.open(str(tmp_path / "own"), max_bytes=None)
    assert caplog.messages == []
