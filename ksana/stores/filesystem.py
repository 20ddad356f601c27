"""A directory as remote cache: one safetensors file per block, shared by as many processes as like.

    root/3f/3f9a...66.safetensors      one block; the name is the key in hex, so no key can leave the root
    root/tmp/...                       files being written

- A file appears by rename, whole. There is no fsync: after a power failure a file may be short or hold
  zeros, which its checksum tells, and a cache that waited for the disk would be slower than computing.
- All I/O is in threads. A caller that is cancelled leaves its thread behind (a frozen NFS answers nobody),
  so threads read into and write from buffers of their own, never the caller's; at most `_NUM_READERS` + 2
  threads can hang, and everybody else waits for them, cancellable.
- Damaged files are deleted when they are found: they would be reported as present for ever.
- With a cap, the least recently used files are deleted before a new one is written. mtime is the time of
  last use, so all processes see it. The index is in memory; a scan fills it from the first write on and again
  after each sixteenth of the cap written, because other processes write too: n of them may together exceed
  the cap by about n sixteenths. Scans have a thread of their own, as a large directory takes longer than a
  write may: until the first is done, only what this process has written and read counts.
- Only regular files are blocks. What else stands in the place of one is neither counted nor evicted, and
  harms that key alone (`ksana.stores.block_places`).
- KV tells prompts: files have mode 0600 and directories 0700, whatever the umask. Those of ours that are
  there with wider modes are tightened by scans; a root that others may read is told of at the start.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import trio

from ksana.errors import ConfigError, RemoteCacheError
from ksana.private_files import (
    DIRECTORY_MODE,
    FILE_MODE,
    exposure,
    make_private_directories,
    open_private,
    tighten,
)
from ksana.stores import block_file, envelope
from ksana.stores.block_places import (
    NAME,
    SHARD,
    block_path,
    check_place,
    fault_of,
    has_shard,
    is_directory,
    is_regular,
    named_path,
)
from ksana.stores.envelope import DamagedValue, KeyFault
from ksana.stores.file_index import FileIndex, IndexedFile

T = TypeVar("T")
log = logging.getLogger(__name__)

_NUM_READERS = 4
_MAX_SCANNED = 1_000_000
"""Directory entries of a scan; what is beyond is neither counted nor evicted."""
_SCAN_PATIENCE_S = 0.25
"""A write waits so long for the scan it has begun: enough for thousands of files, little of its deadline."""
_MAX_UNDELETABLE = 64
"""Files that one write tries in vain to delete before it gives up; the next write tries others."""
_ORPHANED_AFTER_S = 900.0
"""A file in tmp/ that nobody has written to for so long belongs to a process that died. Deleting one too
many (clocks differ) costs its writer one failed write."""
_TEMPORARY = "tmp"
_TEMPORARY_NAME = re.compile(r"[0-9]+-[0-9a-f]+")
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
        """Bytes since the last scan began; None before the first. Only the writer's."""
        self._scan: threading.Thread | None = None

    @classmethod
    def open(cls, root: str, *, max_bytes: int | None) -> FilesystemStore:
        """Make the directory if it is not there: readable by its owner alone, as KV tells prompts."""
        try:
            make_private_directories(root)
        except OSError as error:
            raise ConfigError(f"the remote cache {root} is no directory: {error.strerror}") from error
        exposed = exposure(root)
        if exposed is not None:
            log.warning(
                "the remote cache %s %s, and KV tells prompts: `chmod 700` it, or name another directory",
                root,
                exposed,
            )
        return cls(root, max_bytes=max_bytes)

    # the four operations

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        paths = [block_path(self._root, key) for key in keys]
        return await self._in_thread(self._readers, lambda: [is_regular(path) for path in paths])

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

    # in a reader's thread

    def _open(self, path: str) -> int | None:
        """A descriptor of what stands in the place of a block, if anything does."""
        try:
            if has_shard(path):
                return os.open(path, _READ_FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise fault_of(error, path) from error
        self._index.removed(os.path.basename(path))
        return None

    def _read(self, key: bytes, size: int) -> bytearray | None:
        path = block_path(self._root, key)
        descriptor = self._open(path)
        if descriptor is None:
            return None
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):  # fdopen would refuse a directory, and not close it
                raise KeyFault(f"{path} is no regular file")
            file = os.fdopen(descriptor, "rb", buffering=0)
        except BaseException:
            os.close(descriptor)
            raise
        with file:
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
            self._begin_scan()
        path = block_path(self._root, key)
        check_place(path)
        if self._max_bytes is not None:
            self._make_room(size, self._max_bytes)
        self._write_and_rename(path, key, payload)
        self._num_written = (self._num_written or 0) + size
        if self._max_bytes is not None:
            used_ns = os.stat(path, follow_symlinks=False).st_mtime_ns
            self._index.used(IndexedFile(os.path.basename(path), size, used_ns))

    def _write_and_rename(self, path: str, key: bytes, payload: bytes) -> None:
        temporary, descriptor = self._open_temporary()
        try:
            block_file.write(descriptor, key, payload)
            try:
                os.rename(temporary, path)
            except FileNotFoundError:
                make_private_directories(os.path.dirname(path))
                os.rename(temporary, path)
            except OSError as error:
                raise fault_of(error, path) from error
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _open_temporary(self) -> tuple[str, int]:
        directory = f"{self._root}/{_TEMPORARY}"
        temporary = f"{directory}/{os.getpid()}-{secrets.token_hex(8)}"
        try:
            if not is_directory(directory):
                raise NotADirectoryError(errno.ENOTDIR, f"{_TEMPORARY} in it is no directory")
            return temporary, open_private(temporary, _WRITE_FLAGS)
        except FileNotFoundError:
            make_private_directories(directory)
            return temporary, open_private(temporary, _WRITE_FLAGS)

    def _make_room(self, num_bytes: int, max_bytes: int) -> None:
        """Delete the least recently used files until `num_bytes` more fit.

        Files that cannot be deleted are passed over; they go on counting. OSError if too many are.
        """
        undeletable: list[IndexedFile] = []
        try:
            while self._index.num_bytes + num_bytes + sum(file.num_bytes for file in undeletable) > max_bytes:
                oldest = self._index.least_recently_used()
                if oldest is None and not undeletable:
                    return  # a reader found the last one gone
                if oldest is None:
                    raise OSError("no file in it can be deleted to make room")
                try:
                    self._evict(oldest)
                except OSError:
                    self._index.removed(oldest.name)
                    undeletable.append(oldest)
                    if len(undeletable) >= _MAX_UNDELETABLE:
                        raise
        finally:
            for file in undeletable:
                self._index.used(file)

    def _evict(self, file: IndexedFile) -> None:
        """Delete it, unless it was used since: then the index learns that."""
        path = named_path(self._root, file.name)
        try:
            is_reachable = has_shard(path)
            info = os.stat(path, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            self._index.removed(file.name)  # another process was faster
            return
        if not is_reachable or not stat.S_ISREG(info.st_mode):
            self._index.removed(file.name)
        elif info.st_mtime_ns > file.used_ns:
            self._index.used(IndexedFile(file.name, info.st_size, info.st_mtime_ns))
        else:
            self._delete(path)

    def _is_scan_due(self) -> bool:
        if self._scan is not None and self._scan.is_alive():
            return False
        if self._num_written is None:
            return True
        return self._max_bytes is not None and self._num_written > self._max_bytes // 16

    def _begin_scan(self) -> None:
        self._num_written = 0
        self._scan = threading.Thread(target=self._run_scan, name="ksana-store-scan", daemon=True)
        self._scan.start()
        self._scan.join(_SCAN_PATIENCE_S)

    # in the scan's thread

    def _run_scan(self) -> None:
        """Count what is there, and delete what writers that died have left in tmp/."""
        try:
            self._delete_orphans()
            if self._max_bytes is not None:
                self._index.begin_scan()
                self._index.replace(self._files())
        except OSError as error:
            # The index stays as it was, and the next scan is due after the next sixteenth of the cap.
            log.warning("remote cache %s could not be scanned: %s", self._root, error.strerror or error)

    def _delete_orphans(self) -> None:
        now_s = self._wall_clock()
        _tighten(f"{self._root}/{_TEMPORARY}", os.O_DIRECTORY, DIRECTORY_MODE)
        with contextlib.suppress(PermissionError):
            for entry in itertools.islice(self._entries(_TEMPORARY), _MAX_SCANNED):
                with contextlib.suppress(OSError):
                    if not _TEMPORARY_NAME.fullmatch(entry.name):
                        continue
                    if entry.stat(follow_symlinks=False).st_mtime < now_s - _ORPHANED_AFTER_S:
                        os.unlink(entry.path)

    def _files(self) -> list[IndexedFile]:
        files: list[IndexedFile] = []
        for entry in itertools.islice(self._entries_two_deep(), _MAX_SCANNED):
            if not NAME.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError):  # gone, or nothing that could be deleted
                info = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(info.st_mode):
                    if stat.S_IMODE(info.st_mode) & ~FILE_MODE:
                        _tighten(entry.path, os.O_NONBLOCK, FILE_MODE)
                    files.append(IndexedFile(entry.name, info.st_size, info.st_mtime_ns))
        return files

    def _entries_two_deep(self) -> Iterator[os.DirEntry[str]]:
        for directory in itertools.islice(self._entries(""), _MAX_SCANNED):
            if SHARD.fullmatch(directory.name) and directory.is_dir(follow_symlinks=False):
                _tighten(directory.path, os.O_DIRECTORY, DIRECTORY_MODE)
                with contextlib.suppress(PermissionError):  # what cannot be seen cannot be evicted
                    yield from self._entries(directory.name)

    def _entries(self, name: str) -> Iterator[os.DirEntry[str]]:
        """Nothing of what a link leads to, but for the root."""
        try:
            if name and not is_directory(f"{self._root}/{name}"):
                return
            with os.scandir(f"{self._root}/{name}") as entries:
                yield from entries
        except (FileNotFoundError, NotADirectoryError):
            return


def _tighten(path: str, flags: int, mode: int) -> None:
    """As far as it is ours: an older version has made it, or somebody by hand."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags)
        try:
            tighten(descriptor, mode)
        finally:
            os.close(descriptor)
