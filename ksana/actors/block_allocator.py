"""The block allocator's shell.

Receives  `PlanBlocks` and `ResetPools` from the scheduler; answers of the SWA cache manager.
Sends     `BlocksPlanned` to the scheduler; one batch per step to the SWA cache manager.
Owns      the FA pool, the prefix tree, the block tables of all requests.
Never     knows text, sampling or time; touches KV bytes; waits for anybody but the SWA cache manager.
If it fails  the generation ends: see `ksana.runtime.supervisor`.
"""

from __future__ import annotations

from ksana.messages.base import Message
from ksana.runtime.actor import Address, Core, Post, Tap, run_actor
from ksana.runtime.mailbox import Mailbox


async def run_block_allocator(
    core: Core, mailbox: Mailbox[Message], *, scheduler: Post, swa_cache_manager: Post, tap: Tap | None = None
) -> None:
    """Run `ksana.cache.block_allocator.BlockAllocator` until its mailbox is closed."""
    post: dict[Address, Post] = {"scheduler": scheduler, "swa_cache_manager": swa_cache_manager}
    await run_actor("block_allocator", core, mailbox, post, tap)
