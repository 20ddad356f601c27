"""What only a directory can do or suffer: caps, other processes, frozen file systems, foreign files."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.numpy
import trio

from ksana.errors import ConfigError, RemoteCacheError
from ksana.stores import block_file, filesystem
from ksana.stores.envelope import DamagedValue
from ksana.stores.filesystem import FilesystemStore
from tests.stores.conftest import Directory, new_key

BLOCK = 10_000
FILE_BYTES = len(block_file.header(bytes(33), BLOCK, bytes(32))) + BLOCK


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return Directory(tmp_path / "cache")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine too, small directories are scanned before the first write."""
    monkeypatch.setattr(filesystem, "_SCAN_PATIENCE_S", 20.0)


def capped(directory: Directory, num_blocks: int) -> FilesystemStore:
    return FilesystemStore.open(str(directory.root), max_bytes=num_blocks * FILE_BYTES)


def payload(key: bytes, size: int = BLOCK) -> bytes:
    """The one right value of a key."""
    return random.Random(key).randbytes(size)


async def put(store: FilesystemStore, key: bytes) -> None:
    await store.put(key, memoryview(payload(key)))


async def has(store: FilesystemStore, key: bytes) -> bool:
    into = bytearray(BLOCK)
    found = await store.get(key, memoryview(into))
    assert not found or into == payload(key)
    return found


def files(directory: Directory) -> list[Path]:
    return sorted(directory.root.rglob("*.safetensors"))


async def test_people_can_look_into_a_file(directory: Directory) -> None:
    key = new_key()
    await put(directory.open(), key)
    path = directory.path(key)
    assert safetensors.numpy.load_file(path)["kv"].tobytes() == payload(key)
    with safetensors.safe_open(path, framework="numpy") as opened:
        assert opened.metadata()["key"] == key.hex()
        assert opened.metadata()["format"] == block_file.FORMAT


async def test_another_format_version_is_damage_and_deleted(directory: Directory) -> None:
    store, key = directory.open(), new_key()
    await put(store, key)
    raw = directory.read_raw(key)
    directory.write_raw(key, raw.replace(b"ksana-block-1", b"ksana-block-2"))
    with pytest.raises(DamagedValue, match="format 'ksana-block-2'"):
        await has(store, key)
    assert await store.contains([key]) == [False]
    await put(store, key)
    assert await has(store, key)


async def test_a_header_that_claims_to_be_huge_is_not_read(directory: Directory) -> None:
    store, key = directory.open(), new_key()
    directory.write_raw(key, (1 << 62).to_bytes(8, "little") + bytes(100))
    with pytest.raises(RemoteCacheError, match="header"):
        await has(store, key)


async def test_a_header_with_other_numbers_is_an_error(directory: Directory) -> None:
    store, key = directory.open(), new_key()
    await put(store, key)
    raw = directory.read_raw(key)
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    for field, value in (
        ("dtype", "F32"),
        ("shape", [BLOCK, 1]),
        ("shape", [-1]),
        ("data_offsets", [1, BLOCK]),
    ):
        changed = {**header, "kv": {**header["kv"], field: value}}
        text = json.dumps(changed).encode()
        directory.write_raw(key, len(text).to_bytes(8, "little") + text + raw[8 + size :])
        with pytest.raises(RemoteCacheError):
            await has(store, key)


# eviction


async def test_the_least_recently_used_go_first_and_the_cap_holds(directory: Directory) -> None:
    store = capped(directory, 5)
    keys = [new_key() for _ in range(7)]
    for key in keys[:5]:
        await put(store, key)
    assert await has(store, keys[0])
    for key in keys[5:]:
        await put(store, key)
    assert [await has(store, key) for key in keys] == [True, False, False, True, True, True, True]
    assert sum(path.stat().st_size for path in files(directory)) == 5 * FILE_BYTES


async def test_use_before_a_restart_counts_and_so_do_smaller_caps(directory: Directory) -> None:
    keys = [new_key() for _ in range(6)]
    store = capped(directory, 6)
    for number, key in enumerate(keys):
        await put(store, key)
        os.utime(directory.path(key), (1000 + number, 1000 + number))
    assert await has(store, keys[0])
    again = capped(directory, 3)
    last = new_key()
    await put(again, last)
    assert [await has(again, key) for key in keys] == [True, False, False, False, False, True]
    assert await has(again, last)


async def test_a_file_that_another_process_has_used_meanwhile_is_spared(directory: Directory) -> None:
    mine, other = capped(directory, 40), capped(directory, 40)
    keys = [new_key() for _ in range(41)]
    for key in keys[:40]:  # the last scan is before the fortieth
        await put(mine, key)
    await trio.sleep(0.02)  # more than the grain of mtimes
    assert await has(other, keys[0])
    await put(mine, keys[40])
    assert [await has(mine, key) for key in keys] == [True, False, *[True] * 39]


async def test_files_deleted_by_others_are_misses_and_make_room(directory: Directory) -> None:
    store = capped(directory, 3)
    keys = [new_key() for _ in range(6)]
    for key in keys[:3]:
        await put(store, key)
    directory.path(keys[0]).unlink()
    directory.path(keys[1]).unlink()
    assert not await has(store, keys[0])
    for key in keys[3:5]:
        await put(store, key)
    assert [await has(store, key) for key in keys] == [False, False, True, True, True, False]


async def test_what_other_processes_write_is_found_by_the_next_scan(directory: Directory) -> None:
    mine, other = capped(directory, 32), FilesystemStore.open(str(directory.root), max_bytes=None)
    await put(mine, new_key())
    for _ in range(40):
        await put(other, new_key())
    for _ in range(5):  # two sixteenths of the cap
        await put(mine, new_key())
    assert len(files(directory)) <= 32


async def test_a_value_that_does_not_fit_the_cap_is_refused_and_evicts_nothing(directory: Directory) -> None:
    store, key = capped(directory, 2), new_key()
    await put(store, key)
    with pytest.raises(RemoteCacheError, match="capped"):
        await store.put(new_key(), memoryview(bytes(3 * BLOCK)))
    assert await has(store, key)


async def test_foreign_files_are_neither_counted_nor_deleted(directory: Directory) -> None:
    store = capped(directory, 2)
    foreign = [
        directory.root / "notes.txt",
        directory.root / "ab" / "model.safetensors",
        directory.root / "abc" / "f",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(5 * FILE_BYTES))
    keys = [new_key() for _ in range(3)]
    for key in keys:
        await put(store, key)
    assert all(path.exists() for path in foreign)
    assert [await has(store, key) for key in keys] == [False, True, True]


async def test_what_cannot_be_deleted_is_passed_over_and_counts(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, keys = capped(directory, 3), [new_key() for _ in range(5)]
    for key in keys[:3]:
        await put(store, key)
    really_unlink = os.unlink

    def unlink(path: str) -> None:
        if path == str(directory.path(keys[0])):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        really_unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        for key in keys[3:]:
            await put(store, key)
    assert [directory.path(key).exists() for key in keys] == [True, False, False, True, True]


async def test_when_nothing_can_be_deleted_nothing_is_written(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = capped(directory, 3)
    for _ in range(3):
        await put(store, new_key())
    before = files(directory)

    def refuse(_path: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        with pytest.raises(RemoteCacheError, match="deleted"):
            await put(store, new_key())
    assert files(directory) == before
    await put(store, new_key())
    assert len(files(directory)) == 3


async def test_what_is_no_file_is_neither_counted_nor_evicted(directory: Directory) -> None:
    folder, link = new_key(), new_key()
    for key in (folder, link):
        directory.path(key).parent.mkdir(exist_ok=True, parents=True)
    directory.path(folder).mkdir()
    directory.path(link).symlink_to("/nowhere" * 100)
    store, keys = capped(directory, 2), [new_key() for _ in range(3)]
    for key in keys:
        await put(store, key)
    assert [await has(store, key) for key in keys] == [False, True, True]
    assert directory.path(folder).is_dir()
    assert directory.path(link).is_symlink()


async def test_writes_do_not_wait_for_a_slow_scan_and_the_cap_holds_after_it(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = [new_key() for _ in range(6)]
    for number, key in enumerate(old):
        await put(directory.open(), key)
        os.utime(directory.path(key), (1000 + number, 1000 + number))
    may_go_on, really_scan = threading.Event(), os.scandir

    def slow(path: str) -> object:
        if threading.current_thread().name == "ksana-store-scan":
            assert may_go_on.wait(20)
        return really_scan(path)

    monkeypatch.setattr(os, "scandir", slow)
    monkeypatch.setattr(filesystem, "_SCAN_PATIENCE_S", 0.01)
    store, new = capped(directory, 6), [new_key() for _ in range(3)]
    with trio.fail_after(5):
        for key in new:
            await put(store, key)
    assert len(files(directory)) == 9
    may_go_on.set()
    assert store._scan is not None
    await trio.to_thread.run_sync(store._scan.join)
    monkeypatch.setattr(filesystem, "_SCAN_PATIENCE_S", 20.0)
    last = new_key()
    await put(store, last)
    assert [directory.path(key).exists() for key in old] == [False] * 4 + [True] * 2
    assert [await has(store, key) for key in [*new, last]] == [True] * 4


async def test_a_scan_that_fails_fails_no_write(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_path: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "scandir", fail)
    store, key = capped(directory, 3), new_key()
    await put(store, key)
    assert await has(store, key)
    assert "could not be scanned: Input/output error" in caplog.text


# crashes and other processes


async def test_what_a_crash_leaves_between_write_and_rename_is_cleaned_up_later(directory: Directory) -> None:
    (directory.root / "tmp").mkdir(parents=True)
    orphan, fresh = directory.root / "tmp" / "1-a", directory.root / "tmp" / "2-b"
    for path in (orphan, fresh):
        path.write_bytes(b"half a bl")
    os.utime(orphan, (1, 1))
    store, key = capped(directory, 3), new_key()
    await put(store, key)
    assert sorted((directory.root / "tmp").iterdir()) == [fresh]
    assert await has(store, key)


async def test_a_failed_rename_leaves_nothing_behind(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, key = directory.open(), new_key()

    def crash(_source: str, _target: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", crash)
        with pytest.raises(RemoteCacheError, match="Input/output error"):
            await put(store, key)
    assert not await has(store, key)
    assert list((directory.root / "tmp").iterdir()) == []
    await put(store, key)
    assert await has(store, key)


async def test_a_disk_that_is_full_is_an_error_and_leaves_nothing_behind(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, _key: bytes, _payload: bytes) -> int:
        os.close(descriptor)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(block_file, "write", full)
    with pytest.raises(RemoteCacheError, match="No space left"):
        await put(directory.open(), new_key())
    assert list((directory.root / "tmp").iterdir()) == []


async def test_the_whole_directory_may_be_deleted_at_any_time(directory: Directory) -> None:
    store, key = capped(directory, 3), new_key()
    await put(store, key)
    shutil.rmtree(directory.root)
    assert not await has(store, key)
    assert await store.contains([key]) == [False]
    await put(store, key)
    assert await has(store, key)
    assert directory.root.stat().st_mode & 0o777 == 0o700


_OTHER_PROCESS = """
import random, sys, trio
from ksana.stores.filesystem import FilesystemStore
root, max_bytes, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

async def main():
    store = FilesystemStore.open(root, max_bytes=max_bytes)
    chance = random.Random(seed)
    hits = 0
    for _ in range(400):
        key = bytes([chance.randrange(40)]) * 33
        value = random.Random(key).randbytes(10_000)
        if chance.random() < 0.5:
            await store.put(key, memoryview(value))
        else:
            into = bytearray(10_000)
            if await store.get(key, memoryview(into)):
                hits += 1
                assert into == value, "another value"
    print(hits)

trio.run(main)
"""


async def test_two_processes_share_a_directory(directory: Directory) -> None:
    command = [sys.executable, "-c", _OTHER_PROCESS, str(directory.root), str(16 * FILE_BYTES)]
    processes = [
        subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # noqa: ASYNC220
        for seed in range(2)
    ]
    for process in processes:
        output, errors = await trio.to_thread.run_sync(process.communicate)
        assert process.returncode == 0, errors.decode()
        assert int(output) > 20
    assert 10 <= len(files(directory)) <= 16 + 2 * 2
    assert list((directory.root / "tmp").iterdir()) == []


# what cannot be read or written


@pytest.mark.parametrize("reason", [errno.EACCES, errno.EROFS])
async def test_a_read_only_directory_can_be_read_and_not_written(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    key = new_key()
    await put(directory.open(), key)
    really_open = os.open

    def refuse(*_: object, **__: object) -> None:
        raise OSError(reason, os.strerror(reason))

    def open_to_read(path: str, flags: int, mode: int = 0o777) -> int:
        return refuse() if flags & os.O_WRONLY else really_open(path, flags, mode)  # type: ignore[return-value]

    monkeypatch.setattr(os, "open", open_to_read)
    for name in ("unlink", "rename", "utime", "makedirs"):
        monkeypatch.setattr(os, name, refuse)
    store = FilesystemStore(str(directory.root), max_bytes=10 * FILE_BYTES)
    assert await has(store, key)
    with pytest.raises(RemoteCacheError, match=os.strerror(reason)):
        await put(store, new_key())
    assert await has(store, key)


async def test_a_directory_that_may_not_be_entered_is_an_error(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    store = directory.open()
    for name in ("open", "stat"):
        monkeypatch.setattr(os, name, refuse)
    with pytest.raises(RemoteCacheError, match="Permission denied"):
        await has(store, new_key())
    with pytest.raises(RemoteCacheError, match="Permission denied"):
        await store.contains([new_key()])


async def test_what_is_no_file_in_the_place_of_a_block_is_an_error_and_never_waits(
    directory: Directory,
) -> None:
    store = directory.open()
    pipe, folder, link = new_key(), new_key(), new_key()
    for key in (pipe, folder, link):
        directory.path(key).parent.mkdir(exist_ok=True, parents=True)
    os.mkfifo(directory.path(pipe))
    directory.path(folder).mkdir()
    await put(store, link)  # a good block, but in another place
    directory.path(link).rename(directory.root / "elsewhere")
    directory.path(link).symlink_to(directory.root / "elsewhere")
    num_open = len(os.listdir("/proc/self/fd"))
    with trio.fail_after(5):
        assert await store.contains([pipe, folder, link]) == [False] * 3
        for key in [pipe, folder, link] * 10:
            with pytest.raises(RemoteCacheError):
                await has(store, key)
    assert len(os.listdir("/proc/self/fd")) < num_open + 10


def test_a_directory_that_cannot_be_made_is_found_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="no directory"):
            FilesystemStore.open(str(wrong), max_bytes=None)


def test_the_directory_is_for_its_owner_alone(tmp_path: Path) -> None:
    FilesystemStore.open(str(tmp_path / "cache"), max_bytes=None)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


# a file system that does not answer


@pytest.fixture
def thawed(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every open of a file waits for this event, as on a network file system whose server is gone."""
    event = threading.Event()
    really_open = os.open

    def frozen_open(path: str, flags: int, mode: int = 0o777) -> int:
        if "cache" in os.fspath(path):
            assert event.wait(20)
        return really_open(path, flags, mode)

    monkeypatch.setattr(os, "open", frozen_open)
    yield event
    event.set()


async def test_frozen_reads_end_at_their_deadline_and_write_to_nothing_later(
    directory: Directory, thawed: threading.Event
) -> None:
    store, key = directory.open(), new_key()
    thawed.set()
    await put(store, key)
    thawed.clear()
    into = [bytearray(BLOCK) for _ in range(8)]
    began = trio.current_time()
    num_cancelled = 0

    async def read(number: int) -> None:
        nonlocal num_cancelled
        with trio.move_on_after(0.1) as scope:
            await store.get(key, memoryview(into[number]))
        num_cancelled += scope.cancelled_caught

    async with trio.open_nursery() as nursery:
        for number in range(8):  # more than there are threads
            nursery.start_soon(read, number)
    assert num_cancelled == 8
    assert trio.current_time() - began < 2
    thawed.set()
    with trio.fail_after(10):
        for _ in range(10):
            assert await has(store, key)
    assert not any(any(buffer) for buffer in into)


async def test_a_frozen_write_stores_what_was_given_whatever_becomes_of_the_buffer(
    directory: Directory, thawed: threading.Event
) -> None:
    store, key, next_key = directory.open(), new_key(), new_key()
    data = bytearray(payload(key))
    with trio.move_on_after(0.1) as scope:
        await store.put(key, memoryview(data))
    assert scope.cancelled_caught
    data[:] = bytes(BLOCK)
    thawed.set()
    with trio.fail_after(10):
        await put(store, next_key)  # behind the other in the one writer's thread
    assert await has(store, next_key)
    assert await has(store, key)
