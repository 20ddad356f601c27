"""What one activation of the loader says, and what of it is worth a line in the log."""

from __future__ import annotations

from typing import Literal

import msgspec

from ksana.messages.base import Message

Said = tuple[Literal["scheduler", "block_allocator", "executor", "store"], Message]


class LoaderEvent(msgspec.Struct, frozen=True):
    """For people; the shell logs it."""

    level: Literal["info", "warning", "error"]
    text: str


class Activation:
    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        self.said: list[Said] = []
        self.events: list[LoaderEvent] = []

    def scheduler(self, message: Message) -> None:
        self.said.append(("scheduler", message))

    def allocator(self, message: Message) -> None:
        self.said.append(("block_allocator", message))

    def executor(self, message: Message) -> None:
        self.said.append(("executor", message))

    def store(self, message: Message) -> None:
        self.said.append(("store", message))

    def log(self, level: Literal["info", "warning", "error"], text: str) -> None:
        self.events.append(LoaderEvent(level, text))
