"""Cores that go on from a snapshot, through msgpack, say what the ones say that went on without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from ksana.cache.block_allocator import AllocatorSnapshot, BlockAllocator
from ksana.cache.swa_manager import ManagerSnapshot, SWACacheManager
from ksana.messages.base import Message
from tests.stateful.test_loading_machine import LoadingMachine


def through_msgpack(snapshot: Any, kind: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=kind)


class Twin:
    """Two cores that hear the same; both must say the same. Everything else is the first one's."""

    def __init__(self, first: Any, second: Any) -> None:
        self._first, self._second = first, second

    def handle(self, now_s: float, messages: Sequence[Message]) -> list[Any]:
        said: list[Any] = self._first.handle(now_s, messages)
        assert self._second.handle(now_s, messages) == said
        assert self._second.snapshot() == self._first.snapshot()
        return said

    @property
    def newest(self) -> Any:
        return self._second

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)


class SnapshotMachine(LoadingMachine):
    """The life of allocator and SWA cache manager, now and then together with twins from snapshots."""

    @rule(which=st.sampled_from(["allocator", "manager"]))
    def go_on_from_snapshot(self, which: str) -> None:
        core = getattr(self.world, which)
        if core is None:
            return
        if isinstance(core, Twin):
            core = core.newest
        twin: Any
        if which == "allocator":
            twin = BlockAllocator(core.config)
            twin.restore(through_msgpack(core.snapshot(), AllocatorSnapshot))
        else:
            twin = SWACacheManager(core.config)
            twin.restore(through_msgpack(core.snapshot(), ManagerSnapshot))
        setattr(self.world, which, Twin(core, twin))


def test_allocator_and_manager_go_on_from_snapshots_taken_anywhere() -> None:
    run_state_machine_as_test(
        SnapshotMachine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
