"""FA blocks that are kept from eviction while they are written back to a store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ksana.cache.fa_cache import FaCache
from ksana.cache.prefix_tree import Parent
from ksana.errors import InvariantViolated
from ksana.messages.swa import FaBlock


class HeldBlocks:
    """Holds of one FaCache, by the number that their owner gave them.

    With a block everything that stands before it is held: nobody may count on a node without its ancestors,
    and a parent is never evicted before its child.
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
        depths = self._depths(held)
        for block_id in depths:
            pool.hold(block_id)
        self.fa.holds[hold_id] = sorted(depths, key=depths.__getitem__, reverse=True)
        return list(held.values())

    def _depths(self, block_ids: Iterable[int]) -> dict[int, int]:
        """These nodes and everything before them, each with its depth. O(nodes returned)."""
        depths: dict[int, int] = {}
        for block_id in block_ids:
            path: list[int] = []
            node: Parent = block_id
            while isinstance(node, int) and node not in depths:
                path.append(node)
                node = self.fa.tree.parent(node)
            depth = depths[node] + 1 if isinstance(node, int) else 0
            depths.update(zip(reversed(path), range(depth, depth + len(path)), strict=True))
        return depths

    def release(self, hold_id: int) -> None:
        """The store has answered. What nobody else counts on was used last now."""
        block_ids = self.fa.holds.pop(hold_id, None)
        if block_ids is None:
            raise InvariantViolated(f"there is no hold {hold_id}")
        # Children before parents, as the eviction order wants it.
        self.fa.tree.touch(self.fa.pool.unhold(block_ids))
