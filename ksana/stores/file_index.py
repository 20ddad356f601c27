"""Which block files there are, by last use: what a capped directory must know to evict.

Pure but for a lock, since reads and scans touch entries from threads. It may be wrong, as other processes
add and delete files too: whoever evicts looks at the file first, and scans the directory again from time to
time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple


class IndexedFile(NamedTuple):
    name: str
    num_bytes: int
    used_ns: int
    """Its mtime, which every reader sets."""


class FileIndex:
    """Files in the order of their last use, and the sum of their sizes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[str, IndexedFile] = OrderedDict()
        self._num_bytes = 0
        self._since_begin: dict[str, IndexedFile | None] | None = None
        """While a scan runs: what became of files meanwhile (None: removed), as it may not have seen it."""

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._files)

    def begin_scan(self) -> None:
        """From now on remember what becomes of files: to be called before a scan looks at the first."""
        with self._lock:
            self._since_begin = {}

    def replace(self, files: Iterable[IndexedFile]) -> None:
        """Forget everything and take what a scan has found, and what happened since it began."""
        ordered = sorted(files, key=lambda file: (file.used_ns, file.name))
        found = OrderedDict((file.name, file) for file in ordered)
        num_bytes = sum(file.num_bytes for file in found.values())
        with self._lock:
            self._files, self._num_bytes = found, num_bytes
            meanwhile, self._since_begin = self._since_begin or {}, None
            for name, file in meanwhile.items():
                self._set(name, file)

    def used(self, file: IndexedFile) -> None:
        """It was read or written just now (or seen to have been used by another process)."""
        with self._lock:
            self._set(file.name, file)

    def removed(self, name: str) -> None:
        with self._lock:
            self._set(name, None)

    def least_recently_used(self) -> IndexedFile | None:
        with self._lock:
            return next(iter(self._files.values()), None)

    def _set(self, name: str, file: IndexedFile | None) -> None:
        before = self._files.pop(name, None)
        if before is not None:
            self._num_bytes -= before.num_bytes
        if file is not None:
            self._files[name] = file
            self._num_bytes += file.num_bytes
        if self._since_begin is not None:
            self._since_begin.pop(name, None)  # so that the order stays that of use
            self._since_begin[name] = file
