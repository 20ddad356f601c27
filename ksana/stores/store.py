"""What every store can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Store(Protocol):
    """KV blocks by key. One object serves many tasks at once, in any order.

    Every method may raise RemoteCacheError, and only that: unreachable, refused, damaged. None has a
    deadline of its own; callers set one (`trio.move_on_after`) and may cancel at any moment: afterwards
    nobody writes into `into` or reads from `data` any more, and the store goes on working. A cancelled
    `put` may have stored the value or not, never a part of it.
    """

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of the keys there seems to be a value for; whether it is good only `get` says."""
        ...

    async def get(self, key: bytes, into: memoryview) -> bool:
        """Read the value of exactly `len(into)` bytes. False: there is none.

        True: `into` holds it, verified. On RemoteCacheError (also: damaged, of another size, key or format)
        `into` may hold anything.
        """
        ...

    async def put(self, key: bytes, data: memoryview) -> None:
        """Store the value; one that is there already is replaced, and readers see the old or the new one."""
        ...

    async def aclose(self) -> None:
        """Let go of connections. What is stored stays."""
        ...
