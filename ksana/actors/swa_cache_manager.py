"""The SWA cache manager's shell.

Receives  one batch per step, and resets, from the block allocator.
Sends     one answer per batch to the block allocator.
Owns      the pool of sliding-window blocks and the SWA entries.
Never     talks to anybody else; knows tokens or text; keeps a batch open.
If it fails  the generation ends: see `ksana.runtime.supervisor`.
"""

from __future__ import annotations

from ksana.messages.base import Message
from ksana.runtime.actor import Core, Post, Tap, run_actor
from ksana.runtime.mailbox import Mailbox


async def run_swa_cache_manager(
    core: Core, mailbox: Mailbox[Message], *, block_allocator: Post, tap: Tap | None = None
) -> None:
    """Run `ksana.cache.swa_manager.SWACacheManager` until its mailbox is closed."""
    await run_actor("swa_cache_manager", core, mailbox, {"block_allocator": block_allocator}, tap)
