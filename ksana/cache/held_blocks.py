"""FA blocks that are kept from eviction while they are written back to a store."""

from __future__ import annotations

from collections.abc import Sequence

from ksana.cache.fa_cache import FaCache
from ksana.cache.prefix_tree import Parent
from ksana.errors import InvariantViolated
from ksana.messages.swa import FaBlock


class HeldBlocks:
    """Holds of one FaCache, by the number that their owner gave them.

    With a block everything that stands before it is held. Holding the named blocks alone would not do: an
    ancestor could not be evicted before them, yet the pool would count it as one that can be had.
    So nodes are counted (`FaCache.hold_counts`): a node once for each hold that names it and once for each
    counted child, and the pool has one holder of each counted node. Counting up stops at the first ancestor
    that is counted already, and counting down at the first that still is; so a node is let go only after
    everything below it.
    Cost: O(blocks named + ancestors that no other hold has). A chain that is written back from front to back
    in batches that overlap (the next one begins before the one before it ends) costs O(1) a block.
    """

    def __init__(self, fa: FaCache) -> None:
        self.fa = fa

    def hold(self, hold_id: int, blocks: Sequence[FaBlock]) -> list[FaBlock]:
        """Hold those of the blocks that are still there, in the order given, each once."""
        if hold_id in self.fa.holds:
            raise InvariantViolated(f"hold {hold_id} is there already")
        tree, pool = self.fa.tree, self.fa.pool
        held: dict[int, FaBlock] = {}
        for block in blocks:
            block_id = block.fa_block_id
            if block_id in tree and pool.generation(block_id) == block.generation:
                held[block_id] = block
        for block_id in held:
            self._count(block_id)
        self.fa.holds[hold_id] = list(held)
        return list(held.values())

    def _count(self, block_id: int) -> None:
        counts = self.fa.hold_counts
        node: Parent = block_id
        while isinstance(node, int):
            count = counts.get(node, 0)
            counts[node] = count + 1
            if count:
                return
            self.fa.pool.hold(node)
            node = self.fa.tree.parent(node)

    def release(self, hold_id: int) -> None:
        """The store has answered. What nobody else counts on was used last now."""
        block_ids = self.fa.holds.pop(hold_id, None)
        if block_ids is None:
            raise InvariantViolated(f"there is no hold {hold_id}")
        let_go: list[int] = []
        for block_id in reversed(block_ids):
            self._discount(block_id, let_go)
        # Children before parents, as the eviction order wants it.
        self.fa.tree.touch(self.fa.pool.unhold(let_go))

    def _discount(self, block_id: int, let_go: list[int]) -> None:
        """Append the nodes that no hold has any more, children before parents."""
        counts = self.fa.hold_counts
        node: Parent = block_id
        while isinstance(node, int):
            counts[node] -= 1
            if counts[node]:
                return
            del counts[node]
            let_go.append(node)
            node = self.fa.tree.parent(node)
