"""Which block files there are, by last use: what a capped directory must know to evict.

Pure but for a lock, since reads touch entries from threads. It may be wrong, as other processes add and
delete files too: whoever evicts looks at the file first, and scans the directory again from time to time.
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

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._files)

    def replace(self, files: Iterable[IndexedFile]) -> None:
        """Forget everything and take what a scan has found."""
        ordered = sorted(files, key=lambda file: (file.used_ns, file.name))
        with self._lock:
            self._files = OrderedDict((file.name, file) for file in ordered)
            self._num_bytes = sum(file.num_bytes for file in ordered)

    def used(self, file: IndexedFile) -> None:
        """It was read or written just now (or seen to have been used by another process)."""
        with self._lock:
            self._remove(file.name)
            self._files[file.name] = file
            self._num_bytes += file.num_bytes

    def removed(self, name: str) -> None:
        with self._lock:
            self._remove(name)

    def least_recently_used(self) -> IndexedFile | None:
        with self._lock:
            return next(iter(self._files.values()), None)

    def _remove(self, name: str) -> None:
        file = self._files.pop(name, None)
        if file is not None:
            self._num_bytes -= file.num_bytes
