"""The scheduler's shell.

Receives  `AddRequest`, `Abort` and `StopStringFound` from the tokenizer; `BlocksPlanned` from the block
          allocator; `StepDone`, `WorkerReady` and `WorkerLost` from the device executor; `PrefixLoaded` from
          the remote-cache loader; its timer, for deadlines.
Sends     `PlanBlocks` and `ResetPools` to the block allocator; `StepPlan` to the device executor;
          `StepOutputs` to the tokenizer; `LoadPrefix`, `CancelLoad` and `ResetPools` to the remote-cache
          loader, if there is one.
Owns      request states, queues, budgets: it alone starts and ends requests.
Never     polls; touches block tables, pools or text; plans more than one step ahead.
If it fails  the generation ends: see `ksana.runtime.supervisor`.
"""

from __future__ import annotations

from ksana.messages.base import Message
from ksana.runtime.actor import Address, Core, Post, Tap, run_actor
from ksana.runtime.mailbox import Mailbox


async def run_scheduler(
    core: Core,
    mailbox: Mailbox[Message],
    *,
    tokenizer: Post,
    block_allocator: Post,
    executor: Post,
    remote_cache_loader: Post | None = None,
    tap: Tap | None = None,
) -> None:
    """Run `ksana.scheduling.scheduler.Scheduler` until its mailbox is closed."""
    post: dict[Address, Post] = {
        "tokenizer": tokenizer,
        "block_allocator": block_allocator,
        "executor": executor,
    }
    if remote_cache_loader is not None:
        post["remote_cache_loader"] = remote_cache_loader
    await run_actor("scheduler", core, mailbox, post, tap)
