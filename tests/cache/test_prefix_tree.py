"""The prefix tree on its own."""

from __future__ import annotations

import pytest

from ksana.cache.block_pool import BlockPool
from ksana.cache.prefix_tree import PrefixTree, token_bytes
from ksana.errors import InvariantViolated


def grow(tree: PrefixTree, pool: BlockPool, tokens: tuple[int, ...], salt: str = "") -> list[int]:
    """Add these tokens, two to a block, and release them."""
    path = tree.match(salt, token_bytes(tokens), len(tokens) // 2)
    for block_id in path:
        pool.share(block_id)
    for end in range(2 * len(path) + 2, len(tokens) + 1, 2):
        [block_id] = pool.allocate(1)
        tree.insert(path[-1] if path else salt, token_bytes(tokens[end - 2 : end]), block_id)
        path.append(block_id)
    tree.touch(pool.release(reversed(path), 0))
    tree.check()
    return path


def make(num_blocks: int = 10) -> tuple[PrefixTree, BlockPool]:
    pool = BlockPool(num_blocks)
    return PrefixTree(pool, 2), pool


def test_match_stops_at_the_first_difference_and_at_the_cap() -> None:
    tree, pool = make()
    path = grow(tree, pool, (1, 2, 3, 4, 5, 6))
    assert tree.match("", token_bytes((1, 2, 3, 4, 5, 6)), 3) == path
    assert tree.match("", token_bytes((1, 2, 3, 4, 5, 6)), 2) == path[:2]
    assert tree.match("", token_bytes([1, 2, 3, 9, 5, 6]), 3) == path[:1]
    assert tree.match("salt", token_bytes((1, 2, 3, 4)), 2) == []
    assert tree.match("", token_bytes((3, 4)), 1) == []


class SameHash(bytes):
    """Bytes that all have one hash: only comparing them tells them apart."""

    def __hash__(self) -> int:
        return 7


def test_tokens_with_equal_hashes_are_different() -> None:
    tree, pool = make()
    [block_id] = pool.allocate(1)
    tree.insert("", SameHash(token_bytes((1, 2))), block_id)
    assert tree.find("", SameHash(token_bytes((1, 2)))) == block_id
    assert tree.find("", SameHash(token_bytes((1, 3)))) is None


def test_token_bytes_keep_ids_apart() -> None:
    ids = [0, 1, 255, 256, 65_536, 2**31 - 1]
    assert len({token_bytes([i]) for i in ids}) == len(ids)
    with pytest.raises(OverflowError):
        token_bytes([2**31])


def test_a_salt_that_looks_like_a_block_id_is_still_a_salt() -> None:
    tree, pool = make()
    [first, second] = grow(tree, pool, (1, 2, 3, 4))
    assert tree.match(str(first), token_bytes((3, 4)), 1) == []
    assert second in tree


def test_leaves_go_first_and_the_longest_unused_before_others() -> None:
    tree, pool = make()
    a = grow(tree, pool, (1, 2, 3, 4))
    b = grow(tree, pool, (1, 2, 5, 6))
    c = grow(tree, pool, (7, 8))
    assert tree.evict(1) == [a[1]]
    assert tree.evict(2) == [b[1], b[0]]
    assert tree.evict(1) == c
    assert len(tree) == 0
    assert pool.num_free == 10
    tree.check()


def test_a_pinned_path_is_skipped_and_keeps_its_place_when_unpinned() -> None:
    tree, pool = make()
    a = grow(tree, pool, (1, 2, 3, 4))
    b = grow(tree, pool, (5, 6))
    for block_id in a:
        pool.share(block_id)
    assert tree.evict(1) == b
    with pytest.raises(InvariantViolated, match="none is cached"):
        tree.evict(1)
    c = grow(tree, pool, (7, 8))
    tree.unpin(pool.release(reversed(a), 0))
    tree.check()
    assert tree.evict(3) == [a[1], a[0], *c]


def test_use_moves_a_path_to_the_end() -> None:
    tree, pool = make()
    a = grow(tree, pool, (1, 2))
    b = grow(tree, pool, (3, 4))
    grow(tree, pool, (1, 2))
    assert tree.evict(2) == [*b, *a]


def test_equal_nodes_are_refused() -> None:
    tree, pool = make()
    grow(tree, pool, (1, 2))
    [other] = pool.allocate(1)
    with pytest.raises(InvariantViolated, match="already"):
        tree.insert("", token_bytes((1, 2)), other)


def test_much_use_does_not_fill_the_queue() -> None:
    tree, pool = make()
    for _ in range(5000):
        grow(tree, pool, (1, 2))
    assert len(tree._order) == 1


def test_check_notices_a_child_without_its_parent() -> None:
    tree, pool = make()
    [first, _] = grow(tree, pool, (1, 2, 3, 4))
    del tree._children["", token_bytes((1, 2))]
    del tree._nodes[first]
    del tree._order[first]
    with pytest.raises(InvariantViolated, match="outside the tree"):
        tree.check()
