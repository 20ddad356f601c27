"""Staging memory: slots for KV blocks that an engine and its worker share, without any copy between them.

The engine makes it before the first worker and keeps it over restarts. The worker gets the file descriptor;
the file has no name, so nobody else finds it, and it is gone with the last process that has it open. Its
size is sealed: a worker gone mad can write nonsense into slots, but not take them from under the engine.
No torch here: bytes only. What lies in a slot is said in `ksana.messages.staging`.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import msgspec

from ksana.config import format_bytes
from ksana.errors import ConfigError, InvariantViolated

MIN_SLOTS = 4
"""Two for loading, two for writing back: a block may have one of either pool."""
MAX_SLOTS = 4096
_ALIGNMENT = 64
"""Slots begin where vector loads like it."""


class StagingArea(msgspec.Struct, frozen=True, kw_only=True):
    """Where staging memory is and how it is cut: what a worker must know."""

    fd: int
    num_slots: int
    slot_bytes: int


def plan_slots(num_bytes: int, *block_bytes: int) -> tuple[int, int]:
    """(slots, bytes in each) for memory of `num_bytes`; a slot holds a block of any of the given sizes.

    There are at most MAX_SLOTS, however small blocks are. Raises ConfigError, with the numbers, if there
    would be fewer than MIN_SLOTS.
    """
    slot_bytes = -(-max(block_bytes) // _ALIGNMENT) * _ALIGNMENT
    if slot_bytes < 1:
        raise InvariantViolated(f"staging memory for blocks of {block_bytes} bytes")
    num_slots = num_bytes // slot_bytes
    if num_slots < MIN_SLOTS:
        raise ConfigError(
            f"--remote-cache-staging of {format_bytes(num_bytes)} holds {num_slots} KV blocks of "
            f"{format_bytes(slot_bytes)}; "
            f"at least {MIN_SLOTS} are needed: {format_bytes(MIN_SLOTS * slot_bytes)}"
        )
    return min(num_slots, MAX_SLOTS), slot_bytes


class StagingMemory:
    """Slots in shared memory. Zeroed at first; pages are only taken when they are touched."""

    def __init__(self, area: StagingArea, *, owns_fd: bool) -> None:
        """Map memory that exists. Raises OSError or ValueError if it is not there or too small."""
        self.area = area
        self._owns_fd = owns_fd
        self._map = mmap.mmap(area.fd, area.num_slots * area.slot_bytes)
        self._view = memoryview(self._map)

    @classmethod
    def create(cls, num_slots: int, slot_bytes: int) -> StagingMemory:
        """New memory; see `plan_slots`. Raises ConfigError when there is not so much."""
        num_bytes = num_slots * slot_bytes
        fd = -1
        try:
            fd = os.memfd_create("ksana staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(StagingArea(fd=fd, num_slots=num_slots, slot_bytes=slot_bytes), owns_fd=True)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise ConfigError(
                f"staging memory of {format_bytes(num_bytes)} could not be had: {error.strerror}; "
                "ask for less with --remote-cache-staging"
            ) from error

    @classmethod
    def attach(cls, area: StagingArea) -> StagingMemory:
        """The memory behind a file descriptor that somebody else owns."""
        return cls(area, owns_fd=False)

    def slot(self, index: int, num_bytes: int) -> memoryview:
        """The first `num_bytes` bytes of a slot, to read and write. Raises InvariantViolated if outside."""
        if not (0 <= index < self.area.num_slots and 0 <= num_bytes <= self.area.slot_bytes):
            raise InvariantViolated(
                f"{num_bytes} bytes of staging slot {index}: there are {self.area.num_slots} slots "
                f"of {self.area.slot_bytes} bytes"
            )
        start = index * self.area.slot_bytes
        return self._view[start : start + num_bytes]

    def close(self) -> None:
        """Give the memory back; parts that others hold stay valid until they let go. May be repeated."""
        if self._owns_fd:
            os.close(self.area.fd)
            self._owns_fd = False
        self._view.release()
