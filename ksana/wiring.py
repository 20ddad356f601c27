"""Who posts to whom: the mailboxes of one engine, and the actors that decide, wired to each other.

`ksana.engine` adds a tokenizer, a device executor and producers. A simulation adds stand-ins for these, so
that what decides is wired in one place and is the same in both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio

from ksana.actors.block_allocator import run_block_allocator
from ksana.actors.scheduler import run_scheduler
from ksana.actors.swa_cache_manager import run_swa_cache_manager
from ksana.cache.block_allocator import BlockAllocator
from ksana.cache.cache_config import CacheConfig
from ksana.cache.swa_manager import SWACacheManager
from ksana.engine_checks import CheckedCore, check_when_idle
from ksana.journal.recorder import Snapshotting
from ksana.messages.base import Message
from ksana.remote_cache import RemoteCache
from ksana.runtime.actor import Address, Post, Tap
from ksana.runtime.mailbox import Mailbox
from ksana.scheduling.scheduler import Scheduler
from ksana.scheduling.settings import SchedulerSettings

_MESSAGES_PER_SLOT = 4
"""Of one request, at most: Generate, PromptEncoded and Abort in the tokenizer's mailbox; AddRequest, Abort
and StopStringFound in the scheduler's."""
_MESSAGES_PER_LOAD = 4
"""Of one remote load, at most, in the allocator's mailbox: a call, a drop, and the same of the load that
took its place before the allocator came to read them."""
_OTHER_MESSAGES = 1024
"""Of steps, plans and workers; a handful in practice, since each is answered before the next is sent."""


MakeScheduler = Callable[[SchedulerSettings], Scheduler]


class Mailboxes:
    """One per actor, large enough for what so many requests and loads can put into it."""

    def __init__(self, num_slots: int, num_loads: int) -> None:
        for_requests = _MESSAGES_PER_SLOT * num_slots + _OTHER_MESSAGES
        for_loads = _MESSAGES_PER_LOAD * num_loads + _OTHER_MESSAGES
        self.tokenizer: Mailbox[Message] = Mailbox("tokenizer", for_requests)
        self.scheduler: Mailbox[Message] = Mailbox("scheduler", for_requests)
        self.block_allocator: Mailbox[Message] = Mailbox("block_allocator", for_loads)
        self.swa_cache_manager: Mailbox[Message] = Mailbox("swa_cache_manager", for_loads)
        self.executor: Mailbox[Message] = Mailbox("executor", _OTHER_MESSAGES)
        self.remote_cache_loader: Mailbox[Message] = Mailbox("remote_cache_loader", for_requests)

    def clear(self) -> None:
        """Forget all messages: their receivers broke."""
        for mailbox in (
            self.tokenizer,
            self.scheduler,
            self.block_allocator,
            self.swa_cache_manager,
            self.executor,
            self.remote_cache_loader,
        ):
            mailbox.clear()

    def allocators_are_quiet(self) -> bool:
        """No message is on its way to either of the two that own blocks."""
        return not (len(self.block_allocator) or len(self.swa_cache_manager))


@dataclass(frozen=True, slots=True)
class Cores:
    """What decides in one generation of actors."""

    scheduler: Scheduler
    allocator: BlockAllocator
    manager: SWACacheManager | None
    """None without sliding layers."""

    @classmethod
    def fresh(
        cls, settings: SchedulerSettings, config: CacheConfig, make_scheduler: MakeScheduler = Scheduler
    ) -> Cores:
        manager = SWACacheManager(config) if config.has_swa else None
        return cls(make_scheduler(settings), BlockAllocator(config), manager)

    def for_journal(self, remote: RemoteCache | None) -> dict[Address, Callable[[], Snapshotting]]:
        """How a journal gets at them, and at the loader's."""
        cores: dict[Address, Callable[[], Snapshotting]] = {
            "scheduler": lambda: self.scheduler,
            "block_allocator": lambda: self.allocator,
        }
        manager = self.manager
        if manager is not None:
            cores["swa_cache_manager"] = lambda: manager
        if remote is not None:
            cores["remote_cache_loader"] = lambda: remote.loader
        return cores


async def run_deciders(
    cores: Cores,
    mailboxes: Mailboxes,
    *,
    tokenizer: Post,
    executor: Post,
    is_idle: Callable[[], bool],
    remote: RemoteCache | None = None,
    tap: Tap | None = None,
    check_messages: bool = False,
) -> None:
    """Scheduler, block allocator, SWA cache manager and remote-cache loader, until one breaks or all are
    cancelled.

    `tokenizer` and `executor` take what is said to these. `is_idle`: there is no request. With
    `check_messages` the cache's invariants are checked after every message; else when idle.
    """
    allocator, manager = cores.allocator, cores.manager
    loader_post = mailboxes.remote_cache_loader.put if remote is not None else None
    async with trio.open_nursery() as actors:

        async def scheduler() -> None:
            await run_scheduler(
                cores.scheduler,
                mailboxes.scheduler,
                tokenizer=tokenizer,
                block_allocator=mailboxes.block_allocator.put,
                executor=executor,
                remote_cache_loader=loader_post,
                tap=tap,
            )

        async def block_allocator() -> None:
            await run_block_allocator(
                CheckedCore(allocator) if check_messages else allocator,
                mailboxes.block_allocator,
                scheduler=mailboxes.scheduler.put,
                swa_cache_manager=mailboxes.swa_cache_manager.put,
                remote_cache_loader=loader_post,
                tap=tap,
            )

        async def swa_cache_manager(core: SWACacheManager) -> None:
            await run_swa_cache_manager(
                CheckedCore(core) if check_messages else core,
                mailboxes.swa_cache_manager,
                block_allocator=mailboxes.block_allocator.put,
                tap=tap,
            )

        async def remote_cache_loader(remote: RemoteCache) -> None:
            await remote.run(
                mailboxes.remote_cache_loader,
                scheduler=mailboxes.scheduler.put,
                block_allocator=mailboxes.block_allocator.put,
                executor=executor,
                tap=tap,
            )

        actors.start_soon(scheduler)
        actors.start_soon(block_allocator)
        if manager is not None:
            actors.start_soon(swa_cache_manager, manager)
        if remote is not None:
            actors.start_soon(remote_cache_loader, remote)
        actors.start_soon(
            check_when_idle,
            allocator,
            manager,
            lambda: cores.scheduler.status().last_step_id,
            lambda: is_idle() and mailboxes.allocators_are_quiet(),
        )
