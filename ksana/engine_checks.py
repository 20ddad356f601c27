"""Invariants of the cache of a running engine: all of them when it is idle, in tests after every message.

A violation raises InvariantViolated in the nursery of the actors, so it is treated as the bug that it is: see
`ksana.runtime.supervisor`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import trio

from ksana.cache.block_allocator import BlockAllocator
from ksana.cache.invariants import check_together
from ksana.cache.swa_manager import SWACacheManager
from ksana.errors import InvariantViolated
from ksana.messages.base import Message
from ksana.runtime.actor import Core, Said
from ksana.runtime.clock import now_s

log = logging.getLogger(__name__)

CHECK_EVERY_S = 60.0
"""Seconds between full checks, at least."""
_MAX_SHARE = 0.001
"""Of the time, for full checks: those of large pools come less often."""
_FULL_CHECK_EVERY = 1000
"""Messages, when each is checked."""


class _Checkable(Core, Protocol):
    def check(self) -> None: ...

    def check_touched(self) -> None: ...


class CheckedCore:
    """A core whose invariants are checked after each of its messages, in full every thousand."""

    def __init__(self, core: _Checkable) -> None:
        self._core = core
        self._num_messages = 0

    def handle(self, now_s: float, messages: Sequence[Message]) -> list[Said]:
        said: list[Said] = []
        for message in messages:
            said += self._core.handle(now_s, [message])
            self._core.check_touched()
            self._num_messages += 1
            if self._num_messages % _FULL_CHECK_EVERY == 0:
                self._core.check()
        if not messages:
            said += self._core.handle(now_s, messages)
        return said

    def next_timer_s(self) -> float | None:
        return self._core.next_timer_s()


async def check_when_idle(
    allocator: BlockAllocator,
    manager: SWACacheManager | None,
    num_done: Callable[[], int],
    is_idle: Callable[[], bool],
) -> None:
    """Check everything, again and again, whenever nothing is going on and something was since the last time.

    `num_done` counts steps; `is_idle`: no request is there, no message on its way between the two.
    """
    num_checked = 0
    pause_s = CHECK_EVERY_S
    while True:
        await trio.sleep(pause_s)
        if num_done() == num_checked or allocator.is_batch_open or not is_idle():
            continue
        began_s = now_s()
        try:
            check_together(allocator, manager)
        except InvariantViolated:
            log.critical("the cache is not consistent, found while idle; the engine starts afresh")
            raise
        num_checked = num_done()
        pause_s = max(CHECK_EVERY_S, (now_s() - began_s) / _MAX_SHARE)
