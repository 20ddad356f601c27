"""Links that take time: between clients and engines, and between any two machines of a world.

Pure: a link says when something sent now arrives; who sends enters that in the world's agenda. Values of a
remote store take the time that `ksana.stores.simulated` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from ksana.messages.base import Message
from ksana.messages.outputs import StepOutputs
from ksana.runtime.clock import now_s
from ksana.runtime.mailbox import Mailbox
from ksana.wiring import Mailboxes
from simulations.agenda import Agenda

Sharing = Literal["in_turn", "shared"]
"""in_turn: one transfer at a time, in the order of sending. shared: all at once, each its equal part."""


class LinkSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One direction between two machines."""

    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    """0: so much that transfers take no time."""
    sharing: Sharing = "in_turn"


class Link:
    """Calls `arrived` of each transfer when its last byte is there.

    Shared transfers are fluid: n of them get 1/n of the bandwidth each, from moment to moment. Cost: O(1) in
    turn, O(n) per event when shared.
    """

    def __init__(self, spec: LinkSpec, agenda: Agenda) -> None:
        self.spec = spec
        self.num_transfers = 0
        self.num_bytes = 0
        self._agenda = agenda
        self._free_at_s = 0.0
        self._left: dict[int, float] = {}
        """Bytes left per shared transfer under way, by number."""
        self._arrived: dict[int, Callable[[], None]] = {}
        self._told_s = 0.0
        self._version = 0

    @property
    def is_instant(self) -> bool:
        return not (self.spec.latency_s or self.spec.bytes_per_s)

    def send(self, num_bytes: int, arrived: Callable[[], None]) -> None:
        """Begin a transfer now. Without latency and limit, `arrived` is called at once."""
        self.num_transfers += 1
        self.num_bytes += num_bytes
        if self.is_instant:
            arrived()
        elif not self.spec.bytes_per_s:
            self._agenda.at(now_s() + self.spec.latency_s, arrived)
        elif self.spec.sharing == "in_turn":
            self._free_at_s = max(now_s(), self._free_at_s) + num_bytes / self.spec.bytes_per_s
            self._agenda.at(self._free_at_s + self.spec.latency_s, arrived)
        else:
            self._go_on()
            self._left[self.num_transfers] = float(num_bytes)
            self._arrived[self.num_transfers] = arrived
            self._await_next()

    def _go_on(self) -> None:
        """Account for the time since the last event."""
        now = now_s()
        if self._left:
            share = (now - self._told_s) * self.spec.bytes_per_s / len(self._left)
            for number in self._left:
                self._left[number] -= share
        self._told_s = now

    def _await_next(self) -> None:
        self._version += 1
        if not self._left:
            return
        version = self._version
        number = min(self._left, key=self._left.__getitem__)
        seconds = max(0.0, self._left[number]) * len(self._left) / self.spec.bytes_per_s

        def done() -> None:
            if version != self._version:
                return  # another transfer began or ended meanwhile
            self._go_on()
            del self._left[number]
            self._agenda.at(now_s() + self.spec.latency_s, self._arrived.pop(number))
            self._await_next()

        self._agenda.at(now_s() + seconds, done)


class SlowMailbox(Mailbox[Message]):
    """A mailbox whose messages may take time to come. Their order stays, whoever sent them, so that causes
    come before effects as they do between real actors."""

    def __init__(self, name: str, capacity: int, agenda: Agenda) -> None:
        super().__init__(name, capacity)
        self.delay_s = 0.0
        self._agenda = agenda
        self._last_s = 0.0
        """When the last message on its way will come."""
        self.num_on_the_way = 0

    def put(self, message: Message) -> None:
        if not self.delay_s and not self.num_on_the_way:
            super().put(message)
            return
        self._last_s = max(self._last_s, now_s() + self.delay_s)
        self.num_on_the_way += 1
        self._agenda.at(self._last_s, lambda: self._arrive(message))

    def _arrive(self, message: Message) -> None:
        self.num_on_the_way -= 1
        super().put(message)


class SlowPost:
    """What is said to one listener may take time to come. Its order stays."""

    def __init__(self, listen: Callable[[StepOutputs], None], agenda: Agenda) -> None:
        self.delay_s = 0.0
        self.num_on_the_way = 0
        self._listen = listen
        self._agenda = agenda
        self._last_s = 0.0

    def __call__(self, outputs: StepOutputs) -> None:
        if not self.delay_s and not self.num_on_the_way:
            self._listen(outputs)
            return
        self._last_s = max(self._last_s, now_s() + self.delay_s)
        self.num_on_the_way += 1
        self._agenda.at(self._last_s, lambda: self._arrive(outputs))

    def _arrive(self, outputs: StepOutputs) -> None:
        self.num_on_the_way -= 1
        self._listen(outputs)


SLOWABLE = ("scheduler", "block_allocator", "swa_cache_manager", "executor", "remote_cache_loader")
"""Actors whose messages can be delayed."""


class SlowMailboxes(Mailboxes):
    """Mailboxes of an engine of which each can be made slow."""

    def __init__(self, num_slots: int, num_loads: int, agenda: Agenda) -> None:
        super().__init__(num_slots, num_loads)
        self.slow: dict[str, SlowMailbox] = {}
        for actor in SLOWABLE:
            usual = getattr(self, actor)
            self.slow[actor] = SlowMailbox(usual.name, usual.capacity, agenda)
            setattr(self, actor, self.slow[actor])

    def num_on_the_way(self) -> int:
        return sum(mailbox.num_on_the_way for mailbox in self.slow.values())

    def allocators_are_quiet(self) -> bool:
        """No message is there or on its way to either of the two that own blocks."""
        slow = self.slow["block_allocator"].num_on_the_way + self.slow["swa_cache_manager"].num_on_the_way
        return not slow and super().allocators_are_quiet()
