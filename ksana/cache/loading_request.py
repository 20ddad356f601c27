"""What the block allocator knows of a request whose prefix is being loaded from a remote store."""

from __future__ import annotations

import msgspec

from ksana.cache.prefix_tree import TOKEN_BYTES, TokenKey
from ksana.messages.base import RequestId


class LoadingRequest(msgspec.Struct, kw_only=True):
    """A request in state probed or allocated: `is_remote_loading` is true exactly while this exists.

    Invariant: the load is a holder of every block in `pinned` and `reserved`.
    """

    request_id: RequestId
    cache_salt: str
    tokens: bytearray
    """As `prefix_tree.token_bytes`."""
    pinned: list[int]
    """The local FA hit, from the start; all of it in the prefix tree."""
    num_reserved_blocks: int
    """FA blocks set aside: the request's whole need."""
    num_reserved_tokens: int
    resumed: bool
    is_remote_loading_block_allocated: bool = False
    reserved: list[int] = []
    """FA blocks for the positions right after the hit. Nobody else sees them."""
    num_swa_slots: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def num_set_aside(self) -> int:
        """FA blocks that were promised and not taken yet."""
        return max(0, self.num_reserved_blocks - len(self.pinned) - len(self.reserved))

    def key(self, index: int, block_size: int) -> TokenKey:
        """The exact tokens of block `index`."""
        size = block_size * TOKEN_BYTES
        return bytes(self.tokens[index * size : (index + 1) * size])

    def copy(self) -> LoadingRequest:
        """One that goes its own way."""
        return msgspec.structs.replace(
            self, tokens=bytearray(self.tokens), pinned=list(self.pinned), reserved=list(self.reserved)
        )
