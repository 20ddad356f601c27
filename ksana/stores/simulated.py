"""A store without threads or sockets, for simulations: it takes time on trio's clock, and it breaks on order.

Values lie sealed as in Redis and are verified on every read, so that damage is found the way it is found in
earnest. Which keys a fault hits is a function of seed and key, never of the order of calls.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import trio

from ksana.errors import RemoteCacheError
from ksana.stores import envelope
from ksana.stores.envelope import DamagedValue


@dataclass
class Faults:
    """What is wrong with the store now; change the fields at any time. Shares are of all keys, 0 to 1."""

    down: bool = False
    """Every call is refused, those under way too."""
    slowdown: float = 1.0
    """Factor on latency and transfer time."""
    missing_share: float = 0.0
    """Keys there seem to be no values for."""
    vanishing_share: float = 0.0
    """Keys that `contains` reports and `get` does not find: evicted in between."""
    corrupt_share: float = 0.0
    truncated_share: float = 0.0


@dataclass
class Counts:
    """Calls begun, and what came of them."""

    contains: int = 0
    gets: int = 0
    hits: int = 0
    puts: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


class SimulatedStore:
    """`values` may be shared by several stores: machines that see the same data over their own links.

    A call takes `latency_s`, up to `jitter` of it more or less, and then its bytes at `bytes_per_s` on one
    link that calls take turns on.
    """

    def __init__(
        self,
        seed: int,
        *,
        latency_s: float = 0.001,
        jitter: float = 0.2,
        bytes_per_s: float = 1e9,
        values: dict[bytes, bytes] | None = None,
    ) -> None:
        self.faults = Faults()
        self.counts = Counts()
        self.values = {} if values is None else values
        self._seed = seed
        self._random = random.Random(seed)
        self._latency_s = latency_s
        self._jitter = jitter
        self._bytes_per_s = bytes_per_s
        self._link = trio.Lock()
        self._thawed: trio.Event | None = None
        self._is_closed = False

    def freeze(self) -> None:
        """From now on nothing is answered, calls under way included, until `thaw`."""
        if self._thawed is None:
            self._thawed = trio.Event()

    def thaw(self) -> None:
        if self._thawed is not None:
            self._thawed.set()
            self._thawed = None

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self.counts.contains += 1
        for key in keys:
            envelope.check_limits(key, 0)
        await self._take_time(0)
        return [self._is_there(key) for key in keys]

    async def get(self, key: bytes, into: memoryview) -> bool:
        self.counts.gets += 1
        envelope.check_limits(key, len(into))
        await self._take_time(len(into) if self._is_there(key) else 0)
        if not self._is_there(key) or self._hits("vanishing", key, self.faults.vanishing_share):
            return False
        value = self.values[key]
        if self._hits("truncated", key, self.faults.truncated_share):
            value = value[: self._number("where", key) % len(value)]
        elif self._hits("corrupt", key, self.faults.corrupt_share):
            place = self._number("where", key) % len(value)
            value = value[:place] + bytes([value[place] ^ 0x40]) + value[place + 1 :]
        try:
            envelope.verify(key, value, into)
        except DamagedValue:
            self.values.pop(key, None)
            raise
        self.counts.hits += 1
        self.counts.bytes_read += len(into)
        return True

    async def put(self, key: bytes, data: memoryview) -> None:
        self.counts.puts += 1
        value = envelope.seal(key, data) + bytes(data)
        await self._take_time(len(value))
        self.values[key] = value
        self.counts.bytes_written += len(data)

    async def aclose(self) -> None:
        self._is_closed = True
        await trio.lowlevel.checkpoint()

    def _is_there(self, key: bytes) -> bool:
        return key in self.values and not self._hits("missing", key, self.faults.missing_share)

    async def _take_time(self, num_bytes: int) -> None:
        await self._can_answer()
        jitter = 1 + self._jitter * self._random.uniform(-1, 1)
        await trio.sleep(self._latency_s * jitter * self.faults.slowdown)
        await self._can_answer()
        if num_bytes:
            async with self._link:
                await trio.sleep(num_bytes / self._bytes_per_s * self.faults.slowdown)
            await self._can_answer()

    async def _can_answer(self) -> None:
        while self._thawed is not None:
            await self._thawed.wait()
        if self._is_closed:
            raise RemoteCacheError("the simulated store is closed")
        if self.faults.down:
            raise RemoteCacheError("the simulated store is down")

    def _hits(self, fault: str, key: bytes, share: float) -> bool:
        return share > 0 and self._number(fault, key) < share * 2**64

    def _number(self, purpose: str, key: bytes) -> int:
        """The same 64 bits for a seed, purpose and key, whenever asked."""
        digest = hashlib.sha256(f"{self._seed} {purpose} ".encode() + key).digest()
        return int.from_bytes(digest[:8], "little")
