"""Keys known to be in the store, so that nothing is written twice: the least recently seen are forgotten."""

from __future__ import annotations

from collections.abc import Iterable


class KnownKeys:
    """O(1) per key. What is kept is a plain dict in the order of last sight, so it can be written and read.

    A hint only: the store may have evicted the value since. Then it is not written again until the key is
    forgotten here, or missed by a load.
    """

    def __init__(self, keys: dict[bytes, None], capacity: int) -> None:
        self._keys = keys
        self._capacity = capacity

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > self._capacity:
            del self._keys[next(iter(self._keys))]

    def discard(self, keys: Iterable[bytes]) -> None:
        """The store does not have them (any more)."""
        for key in keys:
            self._keys.pop(key, None)
