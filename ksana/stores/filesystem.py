"""A directory as remote cache: one safetensors file per block, shared by as many processes as like.

    root/3f/3f9a...66.safetensors      one block; the name is the key in hex, so no key can leave the root
    root/tmp/...                       files being written

- A file appears by rename, whole. There is no fsync: after a power failure a file may be short or hold
  zeros, which its checksum tells, and a cache that waited for the disk would be slower than computing.
- All I/O is in threads. A caller that is cancelled leaves its thread behind (a frozen NFS answers nobody),
  so threads read into and write from buffers of their own, never the caller's; at most `_NUM_READERS` + 1
  threads can hang, and everybody else waits for them, cancellable.
- Damaged files are deleted when they are found: they would be reported as present for ever.
- With a cap, the least recently used files are deleted before a new one is written. mtime is the time of
  last use, so all processes see it. The index is in memory; one scan fills it at the first write and again
  after each sixteenth of the cap written, because other processes write too: n of them may together exceed
  the cap by about n sixteenths.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import trio

from ksana.errors import ConfigError, RemoteCacheError
from ksana.stores import block_file, envelope
from ksana.stores.envelope import DamagedValue
from ksana.stores.file_index import FileIndex, IndexedFile

T = TypeVar("T")

_NUM_READERS = 4
_MAX_SCANNED = 1_000_000
"""Files of a scan; what is beyond is neither counted nor evicted."""
_ORPHANED_AFTER_S = 900.0
"""A file in tmp/ that nobody has written to for so long belongs to a process that died. Deleting one too
many (clocks differ) costs its writer one failed write."""
_SUFFIX = ".safetensors"
_TEMPORARY = "tmp"
_FAN_OUT = re.compile(r"[0-9a-f]{2}")
_NAME = re.compile(rf"[0-9a-f]{{2,{2 * envelope.MAX_KEY_BYTES}}}{re.escape(_SUFFIX)}")
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class FilesystemStore:
    """See the module. `wall_clock` is compared with the mtime of files in tmp/."""

    def __init__(
        self, root: str, *, max_bytes: int | None, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._wall_clock = wall_clock
        self._readers = trio.CapacityLimiter(_NUM_READERS)
        self._writer = trio.CapacityLimiter(1)  # one, so that nobody else changes what it has counted
        self._index = FileIndex()
        self._num_written: int | None = None
        """Bytes since the last scan; None before the first. Only the writer's."""

    @classmethod
    def open(cls, root: str, *, max_bytes: int | None) -> FilesystemStore:
        """Make the directory if it is not there: readable by its owner alone, as KV tells prompts."""
        try:
            os.makedirs(root, mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the remote cache {root} is no directory: {error.strerror}") from error
        return cls(root, max_bytes=max_bytes)

    # the four operations

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        paths = [self._path(key) for key in keys]
        return await self._in_thread(self._readers, lambda: [self._is_there(path) for path in paths])

    async def get(self, key: bytes, into: memoryview) -> bool:
        envelope.check_limits(key, len(into))
        size = len(into)
        payload = await self._in_thread(self._readers, lambda: self._read(key, size))
        if payload is None:
            return False
        into[:] = payload
        return True

    async def put(self, key: bytes, data: memoryview) -> None:
        envelope.check_limits(key, len(data))
        payload = bytes(data)
        await self._in_thread(self._writer, lambda: self._write(key, payload))

    async def aclose(self) -> None:
        """Nothing is open between calls."""

    async def _in_thread(self, limiter: trio.CapacityLimiter, call: Callable[[], T]) -> T:
        try:
            return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=limiter)
        except OSError as error:
            # Not the file's name: what is wrong is hardly ever one file, and one text is easier to count.
            raise RemoteCacheError(f"remote cache {self._root}: {error.strerror or error}") from error

    def _path(self, key: bytes) -> str:
        envelope.check_limits(key, 0)
        name = key.hex()
        return f"{self._root}/{name[:2]}/{name}{_SUFFIX}"

    # in a reader's thread

    def _is_there(self, path: str) -> bool:
        try:
            os.stat(path, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _read(self, key: bytes, size: int) -> bytearray | None:
        path = self._path(key)
        try:
            descriptor = os.open(path, _READ_FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            self._index.removed(os.path.basename(path))
            return None
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            # A directory that may not be written to can be read: whoever may write evicts by what it knows.
            with contextlib.suppress(OSError):
                os.utime(descriptor)
            info = os.fstat(descriptor)
            try:
                payload = block_file.read(file, info, key, size)
            except DamagedValue:
                with contextlib.suppress(OSError):
                    self._delete(path)
                raise
        if self._max_bytes is not None:
            self._index.used(IndexedFile(os.path.basename(path), info.st_size, info.st_mtime_ns))
        return payload

    def _delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._index.removed(os.path.basename(path))

    # in the writer's thread

    def _write(self, key: bytes, payload: bytes) -> None:
        size = len(block_file.header(key, len(payload), bytes(32))) + len(payload)
        if self._max_bytes is not None and size > self._max_bytes:
            raise RemoteCacheError(
                f"a block of {size} bytes; the remote cache is capped at {self._max_bytes}"
            )
        if self._is_scan_due():
            self._scan()
        path = self._path(key)
        if self._max_bytes is not None:
            self._make_room(size, self._max_bytes)
        self._write_and_rename(path, key, payload)
        self._num_written = (self._num_written or 0) + size
        if self._max_bytes is not None:
            used_ns = os.stat(path, follow_symlinks=False).st_mtime_ns
            self._index.used(IndexedFile(os.path.basename(path), size, used_ns))

    def _write_and_rename(self, path: str, key: bytes, payload: bytes) -> None:
        temporary = f"{self._root}/{_TEMPORARY}/{os.getpid()}-{secrets.token_hex(8)}"
        try:
            descriptor = os.open(temporary, _WRITE_FLAGS, 0o666)
        except FileNotFoundError:
            os.makedirs(self._root, mode=0o700, exist_ok=True)
            os.makedirs(os.path.dirname(temporary), exist_ok=True)
            descriptor = os.open(temporary, _WRITE_FLAGS, 0o666)
        try:
            block_file.write(descriptor, key, payload)
            try:
                os.rename(temporary, path)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _make_room(self, num_bytes: int, max_bytes: int) -> None:
        """Delete the least recently used files until `num_bytes` more fit."""
        while self._index.num_bytes + num_bytes > max_bytes:
            oldest = self._index.least_recently_used()
            assert oldest is not None, "an empty index counts no bytes"
            path = f"{self._root}/{oldest.name[:2]}/{oldest.name}"
            try:
                info = os.stat(path, follow_symlinks=False)
            except FileNotFoundError:
                self._index.removed(oldest.name)  # another process was faster
                continue
            if info.st_mtime_ns > oldest.used_ns:
                self._index.used(IndexedFile(oldest.name, info.st_size, info.st_mtime_ns))
            else:
                self._delete(path)

    def _is_scan_due(self) -> bool:
        if self._num_written is None:
            return True
        return self._max_bytes is not None and self._num_written > self._max_bytes // 16

    def _scan(self) -> None:
        """Count what is there, and delete what writers that died have left in tmp/."""
        self._num_written = 0
        now_s = self._wall_clock()
        for entry in self._entries(_TEMPORARY):
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_mtime < now_s - _ORPHANED_AFTER_S:
                    os.unlink(entry.path)
        if self._max_bytes is not None:
            self._index.replace(self._files())

    def _files(self) -> list[IndexedFile]:
        files: list[IndexedFile] = []
        for directory in self._entries(""):
            if not _FAN_OUT.fullmatch(directory.name):
                continue
            for entry in self._entries(directory.name):
                if not _NAME.fullmatch(entry.name):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    info = entry.stat(follow_symlinks=False)
                    files.append(IndexedFile(entry.name, info.st_size, info.st_mtime_ns))
                if len(files) >= _MAX_SCANNED:
                    return files
        return files

    def _entries(self, name: str) -> Iterator[os.DirEntry[str]]:
        try:
            with os.scandir(f"{self._root}/{name}") as entries:
                yield from entries
        except (FileNotFoundError, NotADirectoryError):
            return
