"""Block planning: scheduler -> block allocator -> SWA cache manager and back, one batch per step.

Words. FA block: KV of the full-attention layers (and MLA and draft layers) for `block_size` tokens.
SWA block: KV of the sliding-window layers for the same tokens, in a pool of its own. Position i of a
request's block tables stands for tokens [i * block_size, (i + 1) * block_size).
"""

from __future__ import annotations

from typing import Literal

from ksana.messages.base import Message, PoolEpoch, RequestId, StepId, Value

NO_BLOCK = -1
"""In a block table: nothing here (a sliding position outside the window)."""


class BlockTableEdit(Value, array_like=True):
    """Set position `index` of a block table to `block_id` (a set, not only an append)."""

    index: int
    block_id: int


class BlockCopy(Value):
    """Copy one block inside a pool before the step computes anything."""

    pool: Literal["fa", "swa"]
    source: int
    destination: int


class UpdateRequestTokens(Value):
    """Tokens of a request whose KV a done step has written, and ids that became known.

    `token_ids` extends the allocator's copy of the request's tokens; `num_computed_tokens` is how many
    leading tokens have their KV written by done steps. Blocks that became full join the tree
    (`AppendFilledCachedBlock`).
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    num_computed_tokens: int


class ReleaseRequest(Value):
    """The request ended or was preempted: drop its references; full blocks stay as cache."""

    request_id: RequestId


class NewRequestBlocks(Value):
    """First allocation of a request (or the first after a preemption): what the prefix match needs.

    If a remote load of the request was confirmed, it goes on from there instead of matching.
    """

    token_ids: tuple[int, ...]
    cache_salt: str = ""
    num_reserved_tokens: int = 0
    """Admission: the request is refused (BlocksRefused `no_room`) unless blocks for this many leading
    tokens could be had now (free or evictable, and not set aside for requests admitted before it), so
    that a long prompt is not admitted into a pool that cannot hold it."""
    num_tokens_at_most: int = 0
    """Tokens that need KV before the request ends at the latest: it is refused for good (`never`) where the
    pool does not hold them all. 0: not known."""
    resumed: bool = False
    """It ran before (preempted, or the worker was lost): its hits are not counted again."""


class AllocateRequestBlocks(Value):
    """Blocks for computing `num_tokens` tokens of one request in this step.

    For a running request the tokens are [num_computed_tokens, num_computed_tokens + num_tokens), where
    steps in flight count as computed. For a new one (`new` is set) the start is what the prefix match
    gives, and num_tokens is an upper bound: the allocator takes
    min(num_tokens, tokens left, token budget left).
    """

    request_id: RequestId
    num_computed_tokens: int
    num_tokens: int
    new: NewRequestBlocks | None = None


class PlanBlocks(Message):
    """scheduler -> block allocator. One batch for one step, in this order: updates, releases, demands.

    Demands are in priority order. A refused demand leaves the request as it was (cached blocks may have
    been evicted for it, if only SWA blocks were missing), and every *new* demand behind the first refused
    demand is refused too (no overtaking); running demands behind it are still tried. A running request
    gets min(num_tokens, token budget left).

    Send one without demands when the last step is done and nothing else is to be planned: releases become
    effective, and deferred blocks idle, only through this message.
    """

    pool_epoch: PoolEpoch
    step_id: StepId
    done_step_id: StepId
    """Every step up to this one is done: blocks that only they named may become idle."""
    token_budget: int
    updates: tuple[UpdateRequestTokens, ...] = ()
    releases: tuple[ReleaseRequest, ...] = ()
    demands: tuple[AllocateRequestBlocks, ...] = ()


class BlocksGranted(Value):
    request_id: RequestId
    start: int
    """First token to compute: num_computed_tokens, or the cached prefix length of a new request."""
    num_tokens: int
    fa_write_start: int
    """Tokens before this one are computed for the sliding layers only: their FA KV stands in shared
    blocks and must not be written. Equal to `start` in the usual case."""
    fa_edits: tuple[BlockTableEdit, ...] = ()
    swa_edits: tuple[BlockTableEdit, ...] = ()


class BlocksRefused(Value):
    """`no_room`: not now; `budget`: no token budget left; `behind`: behind a refused demand;
    `never`: more blocks than the pool has, even when empty; `loading`: a remote load owns the request. An
    UpdateRequestTokens for such a request is refused too; neither stands in the way of demands behind it.

    The request is as it was. If only the sliding layers refused, cached FA blocks that were evicted for it
    stay evicted: they are free."""

    request_id: RequestId
    reason: Literal["no_room", "budget", "behind", "never", "loading"]


class TableEdits(Value):
    """Edits of a running request's tables, whether it has a grant in this step or not: places taken over
    by a merge, and sliding places that fell out of the window (NO_BLOCK)."""

    request_id: RequestId
    fa_edits: tuple[BlockTableEdit, ...] = ()
    swa_edits: tuple[BlockTableEdit, ...] = ()


class PoolUse(Value):
    """num_free + num_cached + num_referenced + num_deferred + num_held == num_blocks."""

    num_blocks: int
    num_free: int
    num_cached: int
    """Held by the tree (or as SWA entries) only: could be evicted."""
    num_referenced: int
    num_deferred: int
    """Released, but a step in flight still names them."""
    num_held: int = 0
    """Reserved for a remote load, a transfer or a write-back."""


class CacheCounters(Value):
    """Totals since start. Tokens looked up and hit count once per request, not again after a preemption."""

    num_queried_tokens: int = 0
    num_fa_hit_tokens: int = 0
    num_hit_tokens: int = 0
    num_remote_hit_tokens: int = 0
    """How many of num_hit_tokens a remote load has saved."""
    num_fa_evictions: int = 0
    num_swa_evictions: int = 0


class BlocksPlanned(Message):
    """block allocator -> scheduler. The answer to PlanBlocks: one grant or refusal per demand (and one
    refusal `loading` for each update that is refused).

    `edits` must reach the worker with, or before, the next row of the request they name, even when this
    answer grants nothing. A grant's own edits are not repeated in them.
    """

    pool_epoch: PoolEpoch
    step_id: StepId
    grants: tuple[BlocksGranted, ...]
    refusals: tuple[BlocksRefused, ...]
    edits: tuple[TableEdits, ...]
    copies: tuple[BlockCopy, ...]
    fa_use: PoolUse
    swa_use: PoolUse | None
    counters: CacheCounters


class ResetPools(Message):
    """scheduler -> block allocator -> SWA cache manager. The worker was restarted: everything cached,
    referenced, deferred or held is gone. No batch is open when it is sent, or the open one is void."""

    pool_epoch: PoolEpoch
