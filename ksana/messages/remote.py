"""Loading prefixes from a remote store, and writing filled blocks back.

    scheduler  --LoadPrefix, CancelLoad-->  remote-cache loader  --the calls below-->  block allocator
    scheduler  <--PrefixLoaded------------  remote-cache loader  <--their answers----  block allocator

The loader drives the three calls of remote loading, named as everywhere in the field: probe
(`GetRequestPrefixBlockNumberBeforeRemoteCacheLoading`), reserve (`AllocateBlocksForRemoteCache`), confirm
(`ConfirmRemoteCacheLoadingResult`). The block allocator answers each call once, in order, between its
batches; a call it must refuse changes nothing and is answered with `RemoteCallRefused`. A call of an earlier
pool epoch is refused as `wrong_state`, and a hold of one finds no block: the pools were emptied.

KV bytes are in none of these: they lie in staging memory that engine and worker share (`messages.staging`).
"""

from __future__ import annotations

from typing import Literal

from ksana.messages.base import Message, PoolEpoch, RequestId, Value
from ksana.messages.swa import FaBlock

# scheduler and loader


class LoadPrefix(Message):
    """scheduler -> loader. Find what the store has of this waiting request's prefix, and load it.

    Answered by exactly one PrefixLoaded, whatever happens. Until then the loader owns whatever the request
    holds; afterwards the scheduler does.
    """

    pool_epoch: PoolEpoch
    request_id: RequestId
    token_ids: tuple[int, ...]
    cache_salt: str
    num_reserved_tokens: int
    """Room the request needs in all (see NewRequestBlocks): loading starts only if that can be had."""
    give_up_at_s: float
    """Clock time after which the rest is recomputed."""
    prefill_tokens_per_s: float
    """Measured; 0 when not known yet. For the choice between loading and computing."""
    resumed: bool = False
    """It ran before: its hits are not counted again."""


class CancelLoad(Message):
    """scheduler -> loader. The request ended or must make room; PrefixLoaded comes as soon as may be."""

    request_id: RequestId


LoadOutcome = Literal[
    "loaded", "partial", "nothing", "not_worth_it", "no_room", "store_failed", "cancelled", "reset"
]


class PrefixLoaded(Message):
    """loader -> scheduler. The answer to LoadPrefix: the request may be planned now.

    With `holds_blocks` the request owns confirmed blocks (references, and unfilled ones kept for its
    prefill); its next AllocateRequestBlocks goes on from them, or ReleaseRequest gives them back.
    """

    pool_epoch: PoolEpoch
    request_id: RequestId
    outcome: LoadOutcome
    holds_blocks: bool
    num_cached_tokens: int = 0
    """Tokens that need no computing, local and remote."""
    num_remote_tokens: int = 0
    """How many of them came from the store."""


# loader and block allocator: loading


class GetRequestPrefixBlockNumberBeforeRemoteCacheLoading(Message):
    """loader -> allocator. State none -> probed. Answered by PrefixBlockNumber; pins both hits."""

    pool_epoch: PoolEpoch
    request_id: RequestId
    token_ids: tuple[int, ...]
    cache_salt: str
    num_reserved_tokens: int
    resumed: bool = False


class PrefixBlockNumber(Message):
    """allocator -> loader. The local hit range, in blocks."""

    pool_epoch: PoolEpoch
    request_id: RequestId
    fa_block_num: int
    """FA hit, before any truncation by the sliding window."""
    swa_block_num: int
    """Endpoint of the Continuous Window Condition; fa_block_num for a model without sliding layers."""
    swa_valid: tuple[bool, ...] = ()
    """For each block of the FA hit: whether it has a valid SWA block (so need not be loaded)."""


class AllocateBlocksForRemoteCache(Message):
    """loader -> allocator. State probed -> allocated. Zeros are legal; all or nothing."""

    pool_epoch: PoolEpoch
    request_id: RequestId
    fa_block_num: int
    """FA blocks for the positions right after the local FA hit."""
    swa_block_num: int
    """SWA blocks not bound to a position yet."""


class RemoteBlocksAllocated(Message):
    pool_epoch: PoolEpoch
    request_id: RequestId
    fa_block_ids: tuple[int, ...]
    swa_block_ids: tuple[int, ...]


class ConfirmRemoteCacheLoadingResult(Message):
    """loader -> allocator. State probed or allocated -> none. Answered by RemoteLoadingConfirmed."""

    pool_epoch: PoolEpoch
    request_id: RequestId
    matched_block_index: int
    """M: leading FA blocks that are valid after loading."""
    matched_remote_swa_block_indexs: tuple[int, ...]
    """Per reserved SWA slot, in order: the FA block index whose window content it holds, or -1."""
    reserved_block_num: int
    """R: reserved but unmatched FA blocks (positions M to M+R-1) that the request keeps, unfilled."""


class RemoteLoadingConfirmed(Message):
    pool_epoch: PoolEpoch
    request_id: RequestId
    cached_blocks: int
    """The endpoint now: the request's leading blocks that need no computing."""
    num_remote_blocks: int
    """What the load has gained: cached_blocks less the endpoint that the local cache alone would give."""


class DropRemoteCacheLoading(Message):
    """loader -> allocator. From any state: forget the load, give everything back. Not answered.

    After a Confirm it gives back the confirmed blocks, as long as the request does not run.

    Transfers only ever write to staging memory, so blocks may be given back at once.
    """

    pool_epoch: PoolEpoch
    request_id: RequestId


RemoteCallName = Literal[
    "GetRequestPrefixBlockNumberBeforeRemoteCacheLoading",
    "AllocateBlocksForRemoteCache",
    "ConfirmRemoteCacheLoadingResult",
]


class RemoteCallRefused(Message):
    """allocator -> loader. The call changed nothing."""

    pool_epoch: PoolEpoch
    request_id: RequestId
    call: RemoteCallName
    reason: Literal["no_room", "wrong_state", "bad_arguments"]
    detail: str


# loader and block allocator: writing back


class FilledBlock(Value):
    """A block that was just computed (not loaded) and is new to the pools: it has joined the tree, or stood
    there before and had no SWA block."""

    block: FaBlock
    chain_key: bytes
    """Content hash of the token chain up to and including this block (`ksana.cache.chain_keys`)."""
    index: int
    """Blocks before it."""


class BlocksFilled(Message):
    """allocator -> loader. Candidates for the store. Only sent when there is one."""

    pool_epoch: PoolEpoch
    blocks: tuple[FilledBlock, ...]


class HoldBlocks(Message):
    """loader -> allocator. Keep these FA blocks, and fixed SWA blocks that hang on them, from eviction."""

    pool_epoch: PoolEpoch
    hold_id: int
    blocks: tuple[FaBlock, ...]


class HeldBlock(Value):
    """`swa_block_id` is NO_BLOCK where there is no fixed SWA block."""

    block: FaBlock
    swa_block_id: int


class BlocksHeld(Message):
    """allocator -> loader. Those that are still there; none is evicted until ReleaseHeldBlocks."""

    pool_epoch: PoolEpoch
    hold_id: int
    held: tuple[HeldBlock, ...]


class ReleaseHeldBlocks(Message):
    """loader -> allocator. The store has answered (or will not). Not answered."""

    pool_epoch: PoolEpoch
    hold_id: int
