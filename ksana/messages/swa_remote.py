"""The calls of `ksana.messages.remote`, for the sliding layers: block allocator <-> SWA cache manager.

The allocator sends one of them at a time, never while a SwaBatch is open. A question (probe, reserve,
confirm, hold) is answered once; a refusal changes nothing. The others are told.
"""

from __future__ import annotations

from ksana.messages.base import Message, PoolEpoch, RequestId
from ksana.messages.swa import FaBlock


class SwaProbe(Message):
    """Where could the request start now? Pins that window, and what a longer FA hit could need of the blocks
    before it. Sets aside the request's whole need. Answered by SwaProbed or SwaCallRefused."""

    pool_epoch: PoolEpoch
    request_id: RequestId
    fa_blocks: tuple[FaBlock, ...]
    """The FA hit, from the start."""
    num_total_tokens: int
    num_reserved_tokens: int


class SwaProbed(Message):
    """`valid` has one entry for each block of the FA hit."""

    pool_epoch: PoolEpoch
    request_id: RequestId
    endpoint: int
    valid: tuple[bool, ...]


class SwaReserve(Message):
    """Blocks to load into, not bound to a position yet. Answered by SwaReserved or SwaCallRefused."""

    pool_epoch: PoolEpoch
    request_id: RequestId
    num_blocks: int


class SwaReserved(Message):
    pool_epoch: PoolEpoch
    request_id: RequestId
    swa_block_ids: tuple[int, ...]


class SwaCallRefused(Message):
    """SWA cache manager -> block allocator. There is no room; nothing has changed."""

    pool_epoch: PoolEpoch
    request_id: RequestId
    detail: str


class SwaConfirm(Message):
    """The load is over. Answered by SwaConfirmed; the request then has an SWA table, but does not run yet."""

    pool_epoch: PoolEpoch
    request_id: RequestId
    fa_blocks: tuple[FaBlock, ...]
    """The FA blocks that are valid now, from the start; all of them stand in the tree."""
    num_local: int
    """How many of them would be there without the load."""
    matched_indices: tuple[int, ...]
    """Per reserved block, in order: the index in fa_blocks whose content it holds, or -1."""
    num_total_tokens: int
    num_reserved_tokens: int


class SwaConfirmed(Message):
    """`endpoint` of the Continuous Window Condition; `local_endpoint`, what it would be without the load."""

    pool_epoch: PoolEpoch
    request_id: RequestId
    endpoint: int
    local_endpoint: int


class SwaDrop(Message):
    """The load is forgotten: pins and reserved blocks go back. Not answered."""

    pool_epoch: PoolEpoch
    request_id: RequestId


class SwaReleaseConfirmed(Message):
    """A confirmed request that never ran gives its blocks back. Not answered."""

    pool_epoch: PoolEpoch
    request_id: RequestId


class SwaForget(Message):
    """FA blocks that left the tree between batches: their SWA blocks go with them. Not answered."""

    pool_epoch: PoolEpoch
    evicted: tuple[FaBlock, ...]


class SwaHold(Message):
    """Keep the fixed SWA blocks of these FA blocks from eviction. Answered by SwaHeld."""

    pool_epoch: PoolEpoch
    hold_id: int
    blocks: tuple[FaBlock, ...]


class SwaHeld(Message):
    """One entry for each block asked for; NO_BLOCK where there is no fixed SWA block."""

    pool_epoch: PoolEpoch
    hold_id: int
    swa_block_ids: tuple[int, ...]


class SwaReleaseHeld(Message):
    """Not answered."""

    pool_epoch: PoolEpoch
    hold_id: int


SwaAnswer = SwaProbed | SwaReserved | SwaCallRefused | SwaConfirmed | SwaHeld
"""What the SWA cache manager answers to the questions above."""

SwaCall = (
    SwaProbe | SwaReserve | SwaConfirm | SwaDrop | SwaReleaseConfirmed | SwaForget | SwaHold | SwaReleaseHeld
)
"""What the block allocator asks and tells."""
