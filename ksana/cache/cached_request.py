"""What the block allocator knows of one request that has blocks."""

from __future__ import annotations

import msgspec

from ksana.cache.prefix_tree import TOKEN_BYTES
from ksana.messages.base import RequestId, StepId


class CachedRequest(msgspec.Struct, kw_only=True):
    """Block table and progress of a request. "Block i" stands for tokens [i * B, (i + 1) * B).

    Invariants: fa_block_ids[:num_cached_blocks] stand in the prefix tree, each below the one before;
    the request is an owner of every block in its table; num_computed <= num_planned.
    """

    request_id: RequestId
    cache_salt: str
    tokens: bytearray
    """Known tokens (as `prefix_tree.token_bytes`): the keys of blocks that will join the tree."""
    fa_block_ids: list[int]
    """The FA block table."""
    num_matched: int = 0
    """Leading blocks that came from the prefix match; never written."""
    num_cached_blocks: int = 0
    """Leading blocks that stand in the tree."""
    num_computed: int = 0
    """Leading tokens whose KV done steps have written."""
    num_planned: int = 0
    """The same, steps in flight included."""
    last_step_id: StepId = 0
    """The last step that names this request."""
    num_reserved_blocks: int = 0
    """FA blocks set aside by admission: the table may grow up to here before others are admitted."""
    num_reserved_tokens: int = 0
    is_confirmed: bool = False
    """It got its blocks from a remote load and does not run yet: num_computed is where it will start."""
    num_remote_tokens: int = 0
    """Leading tokens that need no computing only because of that load."""
    chain_key: bytes = b""
    """The chain key of block num_chained - 1 (of the root if 0); only if blocks are written back."""
    num_chained: int = -1
    swa_first: int = 0
    """First block with a place in the SWA table."""
    swa_end: int = 0
    """End of the SWA table (exclusive): SWA blocks exist for [swa_first, swa_end)."""

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def num_set_aside(self) -> int:
        """FA blocks that admission promised and the request has not taken yet."""
        return max(0, self.num_reserved_blocks - len(self.fa_block_ids))

    def copy(self) -> CachedRequest:
        """One that goes its own way."""
        return msgspec.structs.replace(
            self, tokens=bytearray(self.tokens), fa_block_ids=list(self.fa_block_ids)
        )
