"""The remote cache of one engine: its store, its staging memory, and a loader per generation of actors.

The store and the memory outlive generations: what is stored stays good, and the worker processes of all
epochs share one memory.
"""

from __future__ import annotations

import msgspec
import trio

from ksana.actors.remote_cache_loader import run_remote_cache_loader
from ksana.config import Settings
from ksana.devices.staging import StagingMemory
from ksana.loading.remote_cache_loader import RemoteCacheLoader
from ksana.loading.settings import LoaderSettings
from ksana.messages.base import Message
from ksana.messages.stores import RemoteCacheStatus
from ksana.runtime.actor import Post, Tap
from ksana.runtime.mailbox import Mailbox
from ksana.stores.store import Store, open_store

CLOSE_WITHIN_S = 2.0
"""How long a store may take to let go of its connections."""


class RemoteCache:
    """Receives nothing itself; `run` is the loader actor of one generation."""

    def __init__(self, store: Store, staging: StagingMemory, settings: LoaderSettings) -> None:
        self.staging = staging
        self._store = store
        self._settings = settings
        self._past = RemoteCacheStatus()
        self._loader = RemoteCacheLoader(settings)
        self._is_fresh = True

    @property
    def settings(self) -> LoaderSettings:
        """What loaders are started with."""
        return self._settings

    @property
    def loader(self) -> RemoteCacheLoader:
        """The core of the present generation."""
        return self._loader

    def renew(self) -> None:
        """A fresh core, for the next `run`."""
        if not self._is_fresh:
            self._past = self.status()
            self._loader = RemoteCacheLoader(self._settings)
            self._is_fresh = True

    async def run(
        self,
        mailbox: Mailbox[Message],
        *,
        scheduler: Post,
        block_allocator: Post,
        executor: Post,
        tap: Tap | None = None,
    ) -> None:
        """Load and save with a fresh core, until cancelled. Orders to the store end with it."""
        self.renew()
        self._is_fresh = False
        await run_remote_cache_loader(
            self._loader,
            mailbox,
            store=self._store,
            staging=self.staging,
            scheduler=scheduler,
            block_allocator=block_allocator,
            executor=executor,
            tap=tap,
        )

    def status(self) -> RemoteCacheStatus:
        """Totals of all generations, and where the last one stands."""
        return _sum(self._past, self._loader.status())

    async def aclose(self) -> None:
        """Let go of store and memory, in bounded time. The worker must be gone."""
        try:
            with trio.move_on_after(CLOSE_WITHIN_S):
                await self._store.aclose()
        finally:
            self.staging.close()


def open_remote_store(settings: Settings) -> Store | None:
    """The store that the settings name, or None. Nothing is connected yet. Raises ConfigError."""
    if settings.remote_cache is None:
        return None
    return open_store(settings.remote_cache, max_bytes=settings.remote_cache_max_bytes)


_STATES = frozenset({"num_loading", "num_queued_blocks", "store_ok", "saves_ok"})
"""Fields of the status that say how things are, not how often something was."""


def _sum(past: RemoteCacheStatus, now: RemoteCacheStatus) -> RemoteCacheStatus:
    loads = dict(past.num_loads)
    for outcome, count in now.num_loads:
        loads[outcome] = loads.get(outcome, 0) + count
    totals = {
        name: getattr(past, name) + getattr(now, name)
        for name in now.__struct_fields__
        if name not in _STATES and name != "num_loads"
    }
    return msgspec.structs.replace(now, num_loads=tuple(sorted(loads.items())), **totals)
