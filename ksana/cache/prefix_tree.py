"""The prefix tree: full FA blocks, found again by what stands before them and by their exact tokens."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import TypedDict

import msgspec

from ksana.cache.block_pool import BlockAllocatorGroupInterface
from ksana.errors import InvariantViolated

Parent = int | str
"""The parent's block id; for a first block the request's cache salt (a text never equals a number)."""

TokenKey = bytes
"""The exact token ids of one block, as `token_bytes` gives them: compact, and compared in one go."""

TOKEN_BYTES = 4


def token_bytes(token_ids: Iterable[int]) -> bytes:
    """Token ids as 32-bit integers, in the machine's byte order. Distinct ids give distinct bytes.

    OverflowError for an id that does not fit; vocabularies are checked long before.
    """
    return array("i", token_ids).tobytes()


class TreeNode(msgspec.Struct, gc=False):
    """One full block in the tree."""

    parent: Parent
    key: TokenKey
    num_children: int = 0
    last_used: int = 0
    """Place in the order of last use; set when the last reference is dropped."""
    is_queued: bool = False
    """Whether it stands in the eviction order."""


class TreeSnapshot(TypedDict):
    """A tree as plain values. A node: block id, parent, key, last_used, is_queued."""

    clock: int
    nodes: list[tuple[int, Parent, TokenKey, int, bool]]
    order: list[int]
    come_back: list[tuple[int, int]]


class PrefixTree:
    """Nodes are keyed by parent and exact token ids; dict lookup compares the ids, not only their hash.

    Invariants: every node's parent is in the tree; no two nodes have equal parent and tokens; whoever
    references a node references its ancestors. So a node is never released later than its parent, and the
    least recently used cached node is always a leaf.
    Eviction order: a linked list, as nodes are touched in order of time. Referenced nodes stay in it until
    an eviction passes over them; if they turn out to have been looked at only, they come back to their
    old place in the order, by a small heap.
    Cost: O(1) per matched, inserted, touched or evicted block; O(log k) for one of k nodes that came back.
    """

    def __init__(self, pool: BlockAllocatorGroupInterface, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._children: dict[tuple[Parent, TokenKey], int] = {}
        self._nodes: dict[int, TreeNode] = {}
        self._order: OrderedDict[int, None] = OrderedDict()
        """Block ids by `last_used`."""
        self._come_back: list[tuple[int, int]] = []
        """(last_used, block_id) of nodes that came back, and of some that were used since; a heap."""
        self._clock = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._nodes

    def match(self, cache_salt: str, tokens: bytes | bytearray, max_blocks: int) -> list[int]:
        """Block ids of the longest cached prefix of these tokens (as `token_bytes`), at most `max_blocks`
        blocks. Changes nothing."""
        size = self._block_size * TOKEN_BYTES
        children = self._children
        data = bytes(tokens)
        path: list[int] = []
        parent: Parent = cache_salt
        for end in range(size, max_blocks * size + 1, size):
            block_id = children.get((parent, data[end - size : end]))
            if block_id is None:
                break
            path.append(block_id)
            parent = block_id
        return path

    def find(self, parent: Parent, key: TokenKey) -> int | None:
        """The node with these tokens after `parent`, if there is one."""
        return self._children.get((parent, key))

    def parent(self, block_id: int) -> Parent:
        """What stands before a node: a block id, or the cache salt."""
        return self._nodes[block_id].parent

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
            self._order[block_id] = None
            self._order.move_to_end(block_id)

    def unpin(self, block_ids: Iterable[int]) -> None:
        """These nodes were only looked at: they go back to their old place in the order."""
        for block_id in block_ids:
            node = self._nodes[block_id]
            if not node.is_queued:
                node.is_queued = True
                heappush(self._come_back, (node.last_used, block_id))

    def evict(self, num_blocks: int) -> list[int]:
        """Remove the least recently used unreferenced leaves and free their blocks, in that order.

        The caller has made sure that there are as many cached blocks.
        """
        evicted: list[int] = []
        while len(evicted) < num_blocks:
            block_id = self._pop_oldest()
            if not self._pool.is_cached(block_id):
                self._nodes[block_id].is_queued = False
                continue
            self._remove(block_id, self._nodes[block_id])
            evicted.append(block_id)
        return evicted

    def _pop_oldest(self) -> int:
        """Take the least recently used node out of the order."""
        first = next(iter(self._order), None)
        while self._come_back:
            last_used, block_id = self._come_back[0]
            if first is not None and self._nodes[first].last_used < last_used:
                break
            heappop(self._come_back)
            node = self._nodes.get(block_id)
            if node is not None and node.last_used == last_used:
                return block_id
        if first is None:
            raise InvariantViolated("a block is to be evicted, but none is cached")
        del self._order[first]
        return first

    def _remove(self, block_id: int, node: TreeNode) -> None:
        if node.num_children:
            raise InvariantViolated(f"block {block_id} is the least recently used and not a leaf")
        del self._nodes[block_id]
        del self._children[node.parent, node.key]
        if isinstance(node.parent, int):
            self._nodes[node.parent].num_children -= 1
        self._pool.discard(block_id)

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
        queued = {(self._nodes[block_id].last_used, block_id) for block_id in self._order}
        if sorted(queued) != [(self._nodes[b].last_used, b) for b in self._order]:
            raise InvariantViolated("the eviction order is not the order of last use")
        queued.update(self._come_back)
        for block_id, node in self._nodes.items():
            if node.num_children != num_children[block_id]:
                raise InvariantViolated(f"block {block_id} counts {node.num_children} children")
            if node.is_queued != ((node.last_used, block_id) in queued):
                raise InvariantViolated(f"block {block_id} is not queued as it says")
            if self._pool.is_cached(block_id) and not node.is_queued:
                raise InvariantViolated(f"cached block {block_id} can never be evicted")

    def snapshot(self) -> TreeSnapshot:
        """The whole state as plain values, nodes in order of insertion."""
        return {
            "clock": self._clock,
            "nodes": [
                (block_id, node.parent, node.key, node.last_used, node.is_queued)
                for block_id, node in self._nodes.items()
            ],
            "order": list(self._order),
            "come_back": sorted(self._come_back),
        }

    def restore(self, snapshot: TreeSnapshot) -> None:
        """Go on from a snapshot. The pool was restored before. Raises InvariantViolated for one that no
        tree could have given."""
        self._clock = snapshot["clock"]
        self._nodes = {
            block_id: TreeNode(parent, key, last_used=last_used, is_queued=is_queued)
            for block_id, parent, key, last_used, is_queued in snapshot["nodes"]
        }
        self._children = {(node.parent, node.key): block_id for block_id, node in self._nodes.items()}
        self._order = OrderedDict.fromkeys(snapshot["order"])
        self._come_back = list(snapshot["come_back"])  # sorted, so it is a heap
        num_blocks = self._pool.num_blocks
        if not (self._order.keys() <= self._nodes.keys() and all(0 <= b < num_blocks for b in self._nodes)):
            raise InvariantViolated("the snapshot of a prefix tree names blocks that are none of it")
        for node in self._nodes.values():
            if isinstance(node.parent, int):
                if node.parent not in self._nodes:
                    raise InvariantViolated(f"a node has parent {node.parent} outside the tree")
                self._nodes[node.parent].num_children += 1
        self.check()
