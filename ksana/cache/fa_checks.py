"""The invariants of the FA side: block tables, loads, holds, pool and tree say the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ksana.cache.cached_request import CachedRequest
from ksana.cache.loading_request import LoadingRequest
from ksana.cache.prefix_tree import TOKEN_BYTES, Parent
from ksana.errors import InvariantViolated
from ksana.messages.base import RequestId

if TYPE_CHECKING:
    from ksana.cache.fa_cache import FaCache


def check_requests(fa: FaCache, request_ids: Iterable[RequestId]) -> None:
    """O(blocks of these requests)."""
    for request_id in request_ids:
        request = fa.requests[request_id]
        table = request.fa_block_ids
        if len(table) != len(set(table)):
            raise InvariantViolated(f"request {request_id} has a block twice in its table: {table}")
        if not all(map(fa.pool.owner_count, table)):
            raise InvariantViolated(f"request {request_id} names a block that is not referenced: {table}")
        num_needed = fa.config.num_blocks_for(request.num_planned)
        if len(table) < (request.num_matched if request.is_confirmed else num_needed):
            raise InvariantViolated(f"request {request_id}: {len(table)} blocks are too few: {request}")


def check_all(fa: FaCache) -> None:
    """O(pool): every owner and holder of a block is accounted for, and what the tree should have it has."""
    fa.pool.check()
    fa.tree.check()
    if not fa.loads.keys().isdisjoint(fa.requests):
        raise InvariantViolated(f"loading and with blocks of its own: {fa.loads.keys() & fa.requests}")
    set_aside = sum(request.num_set_aside for request in fa.requests.values())
    set_aside += sum(load.num_set_aside for load in fa.loads.values())
    if set_aside != fa.num_set_aside:
        raise InvariantViolated(f"{set_aside} blocks are set aside, not {fa.num_set_aside}")
    _check_counts(fa)
    for request in fa.requests.values():
        _check_path(fa, request, request.fa_block_ids[: request.num_cached_blocks])
    for load in fa.loads.values():
        _check_path(fa, load, load.pinned)
        if any(block_id in fa.tree or fa.pool.owner_count(block_id) for block_id in load.reserved):
            raise InvariantViolated(f"others see a block that is reserved for a load: {load}")
    _check_holds(fa)


def _check_counts(fa: FaCache) -> None:
    owners = Counter(b for request in fa.requests.values() for b in request.fa_block_ids)
    holders = Counter(b for load in fa.loads.values() for b in (*load.pinned, *load.reserved))
    holders.update(fa.hold_counts.keys())
    for block_id in range(fa.pool.num_blocks):
        if fa.pool.owner_count(block_id) != owners[block_id]:
            raise InvariantViolated(f"block {block_id} has {owners[block_id]} owners by the tables")
        if fa.pool.holder_count(block_id) != holders[block_id]:
            raise InvariantViolated(f"block {block_id} has {holders[block_id]} holders by loads and holds")


def _check_holds(fa: FaCache) -> None:
    counts = Counter(block_id for block_ids in fa.holds.values() for block_id in block_ids)
    if not all(block_id in fa.tree for block_id in (*counts, *fa.hold_counts)):
        raise InvariantViolated(f"a block that is written back left the tree: {fa.holds}")
    counts.update(parent for b in fa.hold_counts if isinstance(parent := fa.tree.parent(b), int))
    if counts != fa.hold_counts:
        raise InvariantViolated(f"held by {fa.holds}: {dict(counts)}, not {fa.hold_counts}")


def _check_path(fa: FaCache, request: CachedRequest | LoadingRequest, path: list[int]) -> None:
    """These are the request's first blocks in the tree."""
    parent: Parent = request.cache_salt
    size = fa.config.block_size * TOKEN_BYTES
    for index, block_id in enumerate(path):
        key = bytes(request.tokens[index * size : (index + 1) * size])
        if fa.tree.find(parent, key) != block_id:
            raise InvariantViolated(f"request {request.request_id}: block {index} is not in the tree")
        parent = block_id
