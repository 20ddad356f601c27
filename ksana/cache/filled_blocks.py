"""Which blocks a batch has filled, for the remote store, with the chain keys that name them there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ksana.cache.cache_config import CacheConfig
from ksana.cache.cached_request import CachedRequest
from ksana.cache.chain_keys import block_key, little_endian_bytes, root_key
from ksana.cache.prefix_tree import TOKEN_BYTES
from ksana.messages.remote import FilledBlock
from ksana.messages.swa import FaBlock


class FilledBlocks:
    """Blocks to be written back, in the order they were filled, until they are taken.

    Cost: one hash per block of a request, computed once; nothing is called unless blocks are written back.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._config = config
        self._blocks: dict[int, FilledBlock] = {}
        """By block id."""
        self._if_fixed: set[int] = set()
        """Those that stood in the tree before: of worth only if their SWA block is new."""

    @property
    def is_empty(self) -> bool:
        """Everything was taken, and what the SWA cache manager had to say of it is known."""
        return not self._blocks and not self._if_fixed

    def offer(self, request: CachedRequest, index: int, block: FaBlock) -> None:
        """`block` is the request's block `index`, new in the tree. Chain keys go on from the last one that
        was needed."""
        if request.num_chained < 0:
            request.chain_key = root_key(self._config.chain_identity, request.cache_salt)
            request.num_chained = 0
        size = self._config.block_size * TOKEN_BYTES
        for end in range((request.num_chained + 1) * size, (index + 1) * size + 1, size):
            tokens = little_endian_bytes(bytes(request.tokens[end - size : end]))
            request.chain_key = block_key(request.chain_key, tokens)
        request.num_chained = index + 1
        self._blocks[block.fa_block_id] = FilledBlock(block=block, chain_key=request.chain_key, index=index)

    def offer_if_fixed(self, request: CachedRequest, index: int, block: FaBlock) -> None:
        """A matched block was computed again, for its SWA block: the store may lack that one, or have it
        damaged. Whether the pool had it, the SWA cache manager will say (see `drop_unfixed`)."""
        if block.fa_block_id not in self._blocks:
            self.offer(request, index, block)
            self._if_fixed.add(block.fa_block_id)

    def drop_unfixed(self, fixed: Iterable[int]) -> None:
        """The SWA cache manager has said for which FA blocks a computed SWA block is new."""
        for block_id in self._if_fixed.difference(fixed):
            del self._blocks[block_id]
        self._if_fixed.clear()

    def take(self) -> tuple[FilledBlock, ...]:
        """The blocks to be written back since the last call."""
        filled = tuple(self._blocks.values())
        self._blocks.clear()
        return filled

    def snapshot(self) -> tuple[list[FilledBlock], list[int]]:
        """The blocks, and the ids of those that only count if they are fixed."""
        return list(self._blocks.values()), sorted(self._if_fixed)

    def restore(self, blocks: Sequence[FilledBlock], if_fixed: Iterable[int]) -> None:
        """Go on from a snapshot."""
        self._blocks = {filled.block.fa_block_id: filled for filled in blocks}
        self._if_fixed = set(if_fixed)
