"""The block allocator's shell.

Receives  `PlanBlocks` and `ResetPools` from the scheduler; from the SWA cache manager `SwaBatchDone`, and
          `SwaProbed`, `SwaReserved`, `SwaCallRefused`, `SwaConfirmed`, `SwaHeld` (`messages.swa_remote`);
          from the remote-cache loader (`messages.remote`)
          `GetRequestPrefixBlockNumberBeforeRemoteCacheLoading`, `AllocateBlocksForRemoteCache`,
          `ConfirmRemoteCacheLoadingResult`, `DropRemoteCacheLoading`, `HoldBlocks`, `ReleaseHeldBlocks`.
Sends     `BlocksPlanned` to the scheduler; to the SWA cache manager `SwaBatch`, one per step at most,
          `ResetPools`, and `SwaProbe`, `SwaReserve`, `SwaConfirm`, `SwaDrop`, `SwaReleaseConfirmed`,
          `SwaForget`, `SwaHold`, `SwaReleaseHeld`; to the loader `PrefixBlockNumber`,
          `RemoteBlocksAllocated`, `RemoteLoadingConfirmed`, `RemoteCallRefused`, `BlocksHeld` as answers,
          and `BlocksFilled`.
Owns      the FA pool, the prefix tree, the block tables of all requests, loading ones included.
Never     knows text, sampling or time; touches KV bytes; waits for anybody but the SWA cache manager.
If it fails  the generation ends: see `ksana.runtime.supervisor`.
"""

from __future__ import annotations

from ksana.messages.base import Message
from ksana.runtime.actor import Address, Core, Post, Tap, run_actor
from ksana.runtime.mailbox import Mailbox


async def run_block_allocator(
    core: Core,
    mailbox: Mailbox[Message],
    *,
    scheduler: Post,
    swa_cache_manager: Post,
    remote_cache_loader: Post | None = None,
    tap: Tap | None = None,
) -> None:
    """Run `ksana.cache.block_allocator.BlockAllocator` until its mailbox is closed."""
    post: dict[Address, Post] = {"scheduler": scheduler, "swa_cache_manager": swa_cache_manager}
    if remote_cache_loader is not None:
        post["remote_cache_loader"] = remote_cache_loader
    await run_actor("block_allocator", core, mailbox, post, tap)
