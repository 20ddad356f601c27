"""The prefix tree: full FA blocks, found again by what stands before them and by their exact tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

import msgspec

from ksana.cache.block_pool import BlockAllocatorGroupInterface
from ksana.errors import InvariantViolated

Parent = int | str
"""The parent's block id; for a first block the request's cache salt (a text never equals a number)."""

TokenKey = tuple[int, ...]
"""The exact token ids of one block."""


class TreeNode(msgspec.Struct, gc=False):
    """One full block in the tree."""

    parent: Parent
    key: TokenKey
    num_children: int = 0
    last_used: int = 0
    """Place in the order of last use; set when the last reference is dropped."""
    is_queued: bool = False
    """Whether the eviction queue has an entry with this `last_used`."""


class PrefixTree:
    """Nodes are keyed by parent and exact token ids; dict lookup compares the ids, not only their hash.

    Invariants: every node's parent is in the tree; no two nodes have equal parent and tokens; whoever
    references a node references its ancestors. So a node is never released later than its parent, and the
    least recently used cached node is always a leaf.
    Cost: O(1) per matched, inserted or touched block, O(log n) per evicted one (a heap with stale entries,
    which is rebuilt, at amortised O(1), when more than half of it is stale).
    """

    def __init__(self, pool: BlockAllocatorGroupInterface, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._children: dict[tuple[Parent, TokenKey], int] = {}
        self._nodes: dict[int, TreeNode] = {}
        self._queue: list[tuple[int, int]] = []
        self._clock = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._nodes

    def match(self, cache_salt: str, token_ids: Sequence[int], max_blocks: int) -> list[int]:
        """Block ids of the longest cached prefix, at most `max_blocks` blocks. Changes nothing."""
        size = self._block_size
        children = self._children
        tokens = token_ids if isinstance(token_ids, tuple) else tuple(token_ids)
        path: list[int] = []
        parent: Parent = cache_salt
        for end in range(size, max_blocks * size + 1, size):
            block_id = children.get((parent, tokens[end - size : end]))
            if block_id is None:
                break
            path.append(block_id)
            parent = block_id
        return path

    def find(self, parent: Parent, key: TokenKey) -> int | None:
        """The node with these tokens after `parent`, if there is one."""
        return self._children.get((parent, key))

    def insert(self, parent: Parent, key: TokenKey, block_id: int) -> None:
        """Add a filled block, which its owner goes on referencing. There is no equal node."""
        if isinstance(parent, int):
            self._nodes[parent].num_children += 1
        if (parent, key) in self._children or block_id in self._nodes:
            raise InvariantViolated(f"block {block_id} or its tokens stand in the prefix tree already")
        self._children[parent, key] = block_id
        self._nodes[block_id] = TreeNode(parent, key)
        self._pool.keep(block_id)

    def touch(self, block_ids: Iterable[int]) -> None:
        """These nodes lost their last reference, children before parents: most recently used from now on."""
        for block_id in block_ids:
            node = self._nodes[block_id]
            self._clock += 1
            node.last_used = self._clock
            node.is_queued = True
            heappush(self._queue, (self._clock, block_id))
        if len(self._queue) > 2 * self._pool.num_cached + 1024:
            self._rebuild_queue()

    def unpin(self, block_ids: Iterable[int]) -> None:
        """These nodes were only looked at: they go back to their old place in the order."""
        for block_id in block_ids:
            node = self._nodes[block_id]
            if not node.is_queued:
                node.is_queued = True
                heappush(self._queue, (node.last_used, block_id))

    def evict(self, num_blocks: int) -> list[int]:
        """Remove the least recently used unreferenced leaves and free their blocks, in that order.

        The caller has made sure that there are as many cached blocks.
        """
        evicted: list[int] = []
        while len(evicted) < num_blocks:
            if not self._queue:
                raise InvariantViolated(f"{num_blocks} blocks to evict, only {len(evicted)} are cached")
            last_used, block_id = heappop(self._queue)
            node = self._nodes.get(block_id)
            if node is None or node.last_used != last_used:
                continue
            if not self._pool.is_cached(block_id):
                node.is_queued = False
                continue
            if node.num_children:
                raise InvariantViolated(f"block {block_id} is the least recently used and not a leaf")
            self._remove(block_id, node)
            evicted.append(block_id)
        return evicted

    def _remove(self, block_id: int, node: TreeNode) -> None:
        del self._nodes[block_id]
        del self._children[node.parent, node.key]
        if isinstance(node.parent, int):
            self._nodes[node.parent].num_children -= 1
        self._pool.discard(block_id)

    def _rebuild_queue(self) -> None:
        self._queue = []
        for block_id, node in self._nodes.items():
            node.is_queued = self._pool.is_cached(block_id)
            if node.is_queued:
                self._queue.append((node.last_used, block_id))
        heapify(self._queue)

    def check(self) -> None:
        """O(nodes): the invariants above."""
        num_children = dict.fromkeys(self._nodes, 0)
        for block_id, node in self._nodes.items():
            if self._children.get((node.parent, node.key)) != block_id:
                raise InvariantViolated(f"block {block_id} is not found under its parent and tokens")
            if isinstance(node.parent, int):
                if node.parent not in num_children:
                    raise InvariantViolated(f"block {block_id} has parent {node.parent} outside the tree")
                num_children[node.parent] += 1
                parent_refs = self._pool.reference_count(node.parent)
                if parent_refs < self._pool.reference_count(block_id):
                    raise InvariantViolated(f"block {block_id} is referenced more often than its parent")
        if len(self._children) != len(self._nodes):
            raise InvariantViolated(f"{len(self._children)} keys for {len(self._nodes)} nodes")
        queued = set(self._queue)
        for block_id, node in self._nodes.items():
            if node.num_children != num_children[block_id]:
                raise InvariantViolated(f"block {block_id} counts {node.num_children} children")
            if self._pool.is_cached(block_id) and (node.last_used, block_id) not in queued:
                raise InvariantViolated(f"cached block {block_id} can never be evicted")

    def snapshot(self) -> dict[str, Any]:
        """The whole state as plain values, nodes in order of insertion."""
        return {
            "clock": self._clock,
            "nodes": [
                (block_id, node.parent, node.key, node.last_used, node.is_queued)
                for block_id, node in self._nodes.items()
            ],
            "queue": list(self._queue),
        }
