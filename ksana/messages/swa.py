"""The one batch per step between block allocator and SWA cache manager, and its answer.

A block index counts from the start of a request. `generation` tells two lives of one FA block id apart.
The parts of a batch take effect in the order of its fields.
"""

from __future__ import annotations

from typing import Literal

from ksana.messages.base import Message, PoolEpoch, RequestId, StepId, Value
from ksana.messages.blocks import BlockTableEdit, PoolUse, TableEdits


class FaBlock(Value, array_like=True):
    """One life of an FA block id."""

    fa_block_id: int
    generation: int


class SwaFilled(Value, array_like=True):
    """Block `index` of a request was filled by a done step, and this FA block stands for it in the tree.

    The FA block is the request's own, one that was there before (tokens computed again for the sliding
    layers only), or the surviving one of a merge. The SWA block becomes fixed and belongs to it, unless it
    has a valid SWA block already: then the request goes over to that one, and its own is released.
    """

    index: int
    fa_block_id: int
    generation: int


class SwaUpdate(Value):
    """A request has moved on: blocks filled, and those before `first_index` are out of its window."""

    request_id: RequestId
    first_index: int
    filled: tuple[SwaFilled, ...]
    last_step_id: StepId
    """The last step that names the request: a replaced block becomes idle when it is done."""


class SwaRelease(Value):
    """The request ended or was preempted; steps up to `last_step_id` name its blocks."""

    request_id: RequestId
    last_step_id: StepId


class SwaDemand(Value):
    """SWA blocks for one request's tokens in this step.

    A confirmed request (`messages.swa_remote`) is new, but goes on from its endpoint instead of matching:
    first_index is that endpoint.

    A running request computes [start, start + n) with n = min(num_tokens, budget left). For a new one
    `start` is the FA hit; the endpoint of the match replaces it, and
    n = min(num_tokens, num_total_tokens - start, budget left, max_end - start).
    """

    request_id: RequestId
    is_new: bool
    start: int
    num_tokens: int
    num_total_tokens: int
    max_end: int
    """No token at or after this one: the FA part has no block for it."""
    num_reserved_tokens: int
    """Admission: leading tokens that must find room over the next steps; 0 once they are computed."""
    first_index: int
    """Block index of fa_blocks[0]; 0 for a new request."""
    fa_blocks: tuple[FaBlock, ...]
    """FA blocks of a running request from the end of its SWA table on; of a new one, from the start."""
    num_matched: int = 0
    """How many of fa_blocks are the FA hit: the path that the match walks."""
    count_hits: bool = False
    """Whether the match counts as a hit of its blocks: not for a request that ran before."""


class SwaBatch(Message):
    """block allocator -> SWA cache manager. What one PlanBlocks means for the sliding layers.

    Demands in priority order; a refused demand changes nothing, and every new demand behind a refused one
    is refused too. Demands refused for lack of FA blocks are not in here.
    """

    pool_epoch: PoolEpoch
    step_id: StepId
    done_step_id: StepId
    token_budget: int
    updates: tuple[SwaUpdate, ...] = ()
    releases: tuple[SwaRelease, ...] = ()
    evicted: tuple[FaBlock, ...] = ()
    """FA blocks that left the tree: their SWA blocks go with them."""
    demands: tuple[SwaDemand, ...] = ()


class SwaGranted(Value):
    """`start` of a new request is its endpoint, in tokens. Edits fill places of its SWA block table."""

    request_id: RequestId
    start: int
    num_tokens: int
    edits: tuple[BlockTableEdit, ...]


class SwaRefused(Value):
    request_id: RequestId
    reason: Literal["no_room", "budget", "behind", "never"]


class SwaBatchDone(Message):
    """SWA cache manager -> block allocator. One grant or refusal per demand, and edits of SWA tables:
    blocks replaced by a merge, and places that fell out of the window (NO_BLOCK)."""

    pool_epoch: PoolEpoch
    step_id: StepId
    grants: tuple[SwaGranted, ...]
    refusals: tuple[SwaRefused, ...]
    edits: tuple[TableEdits, ...]
    swa_use: PoolUse
    num_evictions: int
    """Total since start: SWA blocks evicted for their low value."""
    fixed: tuple[int, ...] = ()
    """FA blocks whose SWA block is new: computed, and equal to none that was there. Only with write-back."""
