"""The SWA cache manager's shell.

Receives  from the block allocator: `SwaBatch`, one per step, and `ResetPools`; for remote loading and writing
          back, one at a time between batches: `SwaProbe`, `SwaReserve`, `SwaConfirm`, `SwaDrop`,
          `SwaReleaseConfirmed`, `SwaForget`, `SwaHold`, `SwaReleaseHeld` (`ksana.messages.swa_remote`).
Sends     to the block allocator: one `SwaBatchDone` per batch; `SwaProbed` or `SwaCallRefused` to a probe,
          `SwaReserved` or `SwaCallRefused` to a reserve, `SwaConfirmed` to a confirm, `SwaHeld` to a hold.
Owns      the pool of sliding-window blocks, the SWA entries and tables, loads and holds of SWA blocks.
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
