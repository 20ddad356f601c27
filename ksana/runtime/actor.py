"""How a pure core becomes an actor.

A core is a synchronous object: it is given the time and the messages that arrived, and returns what is
to be said to whom. It never waits, reads a clock or knows a channel. One *activation* is one call of
`handle`; with equal activations a core says equal things, which is what makes journals replayable.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol

import trio

from ksana.errors import InvariantViolated
from ksana.messages.base import Message
from ksana.runtime.boundary import described, harms_only_its_request
from ksana.runtime.clock import now_s
from ksana.runtime.direct_mailbox import DirectMailbox
from ksana.runtime.mailbox import Mailbox

Address = Literal[
    "producer",
    "tokenizer",
    "scheduler",
    "block_allocator",
    "swa_cache_manager",
    "executor",
    "remote_cache_loader",
    "store",
    "kv_transfer",
]
"""The actors that can be spoken to; `producer` means the slot of the request the message names, `store` the
port of the remote-cache loader's shell to its store."""

Said = tuple[Address, Message]


class Core(Protocol):
    """The part of an actor that decides."""

    def handle(self, now_s: float, messages: Sequence[Message]) -> Iterable[Said]:
        """One activation. `messages` is empty when only a timer fired."""
        ...

    def next_timer_s(self) -> float | None:
        """When to be activated even if nothing arrives (clock time), or None."""
        ...


Post = Callable[[Message], None]
Tap = Callable[[Address, float, Sequence[Message], Sequence[Said]], None]
"""Told of every activation after it: actor, time, messages in, messages out."""


class Recorder(ABC):
    """A tap that is also told of an activation in which the core raised: the one a person wants to see."""

    @abstractmethod
    def __call__(
        self, actor: Address, now_s: float, messages: Sequence[Message], said: Sequence[Said]
    ) -> None: ...

    @abstractmethod
    def broke(self, actor: Address, now_s: float, messages: Sequence[Message], error: Exception) -> None:
        """The core raised `error`; nothing of what it may have said was sent."""


class Taps(Recorder):
    """Several taps as one, told in order."""

    def __init__(self, *taps: Tap) -> None:
        self._taps = taps

    def __call__(
        self, actor: Address, now_s: float, messages: Sequence[Message], said: Sequence[Said]
    ) -> None:
        for tap in self._taps:
            tap(actor, now_s, messages, said)

    def broke(self, actor: Address, now_s: float, messages: Sequence[Message], error: Exception) -> None:
        for tap in self._taps:
            if isinstance(tap, Recorder):
                tap.broke(actor, now_s, messages, error)


async def run_actor(
    name: Address,
    core: Core,
    mailbox: Mailbox[Message],
    post: Mapping[Address, Post],
    tap: Tap | None = None,
) -> None:
    """Activate `core` whenever messages arrive or its timer fires, and deliver what it says.

    Ends when the mailbox is closed and empty. Exceptions of the core come out: the supervisor's matter.
    """
    if isinstance(mailbox, DirectMailbox):
        await mailbox.attend(lambda messages: _activate_timeless(name, core, messages, post, tap))
    while True:
        # One scope for many activations: the timer rarely moves, and a scope costs more than a message.
        with trio.CancelScope() as waiting:
            while not waiting.cancel_called:
                timer = core.next_timer_s()
                deadline = math.inf if timer is None else timer
                if deadline != waiting.deadline:
                    waiting.deadline = deadline
                try:
                    messages = await mailbox.drain()
                except trio.EndOfChannel:
                    return
                _activate(name, core, messages, post, tap)
        if waiting.cancelled_caught:
            _activate(name, core, (), post, tap)


def _activate(
    name: Address, core: Core, messages: Sequence[Message], post: Mapping[Address, Post], tap: Tap | None
) -> None:
    now = now_s()
    try:
        said = list(core.handle(now, messages))
    except Exception as error:
        if isinstance(tap, Recorder):
            tap.broke(name, now, messages, error)
        raise
    except BaseException as error:
        if not harms_only_its_request(error):
            raise
        # A library's panic. It should have stayed with its request; that it did not is a bug like any other,
        # and must not pass by the supervisor as the end of the program does.
        broken = InvariantViolated(f"{name} let through {described(error)}")
        if isinstance(tap, Recorder):
            tap.broke(name, now, messages, broken)
        raise broken from error
    if tap is not None:
        tap(name, now, messages, said)
    for address, message in said:
        post[address](message)


def _activate_timeless(
    name: Address, core: Core, messages: Sequence[Message], post: Mapping[Address, Post], tap: Tap | None
) -> None:
    _activate(name, core, messages, post, tap)
    if core.next_timer_s() is not None:
        raise InvariantViolated(f"{name} has a timer, but no task that could wait for it")
