"""The full-attention side of remote loading: none -> probed -> allocated -> none.

Each step is a question whether it may be done (`CallRefused` is raised, nothing has changed) and the doing,
which cannot fail. Between the two the SWA cache manager is asked.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ksana.cache.cache_config import ceil_div
from ksana.cache.cached_request import CachedRequest
from ksana.cache.fa_cache import FaCache
from ksana.cache.loading_request import LoadingRequest
from ksana.cache.prefix_tree import Parent, token_bytes
from ksana.errors import InvariantViolated
from ksana.messages.base import RequestId
from ksana.messages.remote import (
    AllocateBlocksForRemoteCache,
    ConfirmRemoteCacheLoadingResult,
    GetRequestPrefixBlockNumberBeforeRemoteCacheLoading,
)


class CallRefused(Exception):
    """A call that must be refused; it has changed nothing."""

    def __init__(self, reason: Literal["no_room", "wrong_state", "bad_arguments"], detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class Confirmed(msgspec.Struct):
    """`num_local`: how many of the matched blocks would stand in the tree without the load."""

    request: CachedRequest
    num_local: int


class RemoteLoading:
    """Loading requests of one FaCache, from the probe to the confirmed request (or none)."""

    def __init__(self, fa: FaCache) -> None:
        self.fa = fa
        self.config = fa.config

    def _loading(self, request_id: RequestId) -> LoadingRequest:
        load = self.fa.loads.get(request_id)
        if load is None:
            raise CallRefused("wrong_state", "the request is not loading: it was not probed, or is confirmed")
        return load

    # none -> probed

    def probe(self, call: GetRequestPrefixBlockNumberBeforeRemoteCacheLoading) -> LoadingRequest:
        """Match and pin the local FA hit, and set aside room for the whole request."""
        fa, config = self.fa, self.config
        if call.request_id in fa.loads:
            raise CallRefused("wrong_state", "the request is loading already")
        if call.request_id in fa.requests:
            raise CallRefused("wrong_state", "the request has blocks already")
        if not config.enable_prefix_caching:
            raise CallRefused("wrong_state", "prefix caching is off")
        num_tokens = len(call.token_ids)
        if num_tokens < 1 or call.num_reserved_tokens < 0:
            raise CallRefused("bad_arguments", f"{num_tokens} tokens, {call.num_reserved_tokens} reserved")
        tokens = bytearray(token_bytes(call.token_ids))
        matched = fa.tree.match(call.cache_salt, tokens, (num_tokens - 1) // config.block_size)
        num_reserved = max(
            config.num_blocks_for(num_tokens), ceil_div(call.num_reserved_tokens, config.block_size)
        )
        num_idle = fa.pool.num_free + fa.pool.num_cached - fa.pool.count_cached(matched)
        room = num_idle - fa.num_set_aside
        if num_reserved - len(matched) > room:
            raise CallRefused(
                "no_room", f"{num_reserved - len(matched)} FA blocks needed, room for {max(0, room)}"
            )
        for block_id in matched:
            fa.pool.hold(block_id)
        load = LoadingRequest(
            request_id=call.request_id,
            cache_salt=call.cache_salt,
            tokens=tokens,
            pinned=matched,
            num_reserved_blocks=num_reserved,
            num_reserved_tokens=call.num_reserved_tokens,
            resumed=call.resumed,
        )
        fa.loads[call.request_id] = load
        fa.num_set_aside += load.num_set_aside
        return load

    def undo_probe(self, request_id: RequestId) -> None:
        """The sliding layers have no room: the hit goes back to its old place in the eviction order."""
        load = self.fa.loads.pop(request_id)
        self.fa.num_set_aside -= load.num_set_aside
        self.fa.tree.unpin(self.fa.pool.unhold(reversed(load.pinned)))

    # probed -> allocated

    def check_allocate(self, call: AllocateBlocksForRemoteCache) -> None:
        """Whether the FA part can be done."""
        load, fa = self._loading(call.request_id), self.fa
        if load.is_remote_loading_block_allocated:
            raise CallRefused("wrong_state", "blocks were allocated already")
        num_blocks, num_slots = call.fa_block_num, call.swa_block_num
        num_left = load.num_reserved_blocks - len(load.pinned)
        if not 0 <= num_blocks <= num_left:
            raise CallRefused("bad_arguments", f"{num_blocks} FA blocks, {num_left} were set aside")
        max_slots = (load.num_tokens - 1) // self.config.block_size if self.config.has_swa else 0
        if not 0 <= num_slots <= max_slots:
            raise CallRefused("bad_arguments", f"{num_slots} SWA blocks, at most {max_slots} are of use")
        num_idle = fa.pool.num_free + fa.pool.num_cached
        if num_blocks > num_idle:
            raise CallRefused("no_room", f"{num_blocks} FA blocks needed, room for {num_idle}")

    def allocate(self, call: AllocateBlocksForRemoteCache) -> LoadingRequest:
        """Reserve FA blocks; least recently used ones are evicted if no others are free."""
        load, fa = self._loading(call.request_id), self.fa
        fa.make_room(call.fa_block_num)
        fa.num_set_aside -= load.num_set_aside
        load.reserved = fa.pool.allocate(call.fa_block_num, held=True)
        fa.num_set_aside += load.num_set_aside
        load.num_swa_slots = call.swa_block_num
        load.is_remote_loading_block_allocated = True
        return load

    # probed or allocated -> none

    def check_confirm(self, call: ConfirmRemoteCacheLoadingResult) -> None:
        """Every rule of the call; `M` is matched_block_index, `R` reserved_block_num."""
        load = self._loading(call.request_id)
        hit, M, R = len(load.pinned), call.matched_block_index, call.reserved_block_num
        end = hit + len(load.reserved)
        cap = (load.num_tokens - 1) // self.config.block_size
        if not hit <= M <= end:
            raise CallRefused("bad_arguments", f"M = {M} is outside of [{hit}, {end}]")
        if cap < M:
            raise CallRefused("bad_arguments", f"M = {M} leaves no token to compute: at most {cap}")
        if not 0 <= R <= end - M:
            raise CallRefused("bad_arguments", f"R = {R}, but {end - M} reserved blocks are left")
        slots = call.matched_remote_swa_block_indexs
        if len(slots) != load.num_swa_slots:
            raise CallRefused("bad_arguments", f"{len(slots)} entries for {load.num_swa_slots} SWA blocks")
        last = -1
        for index in slots:
            if index == -1:
                continue
            if not last < index < M:
                raise CallRefused("bad_arguments", f"SWA indices {slots} do not increase below M = {M}")
            last = index

    def confirm(self, call: ConfirmRemoteCacheLoadingResult) -> Confirmed:
        """Matched blocks join the tree or give way to equal ones that appeared meanwhile; what the request
        keeps becomes its own, the rest is free. It does not run yet."""
        load, fa = self.fa.loads.pop(call.request_id), self.fa
        fa.num_set_aside -= load.num_set_aside
        hit, end = len(load.pinned), call.matched_block_index - len(load.pinned)
        table = list(load.pinned)
        num_local = hit
        for block_id in load.pinned:
            fa.pool.take_over(block_id)
        for index, own in enumerate(load.reserved[:end], hit):
            parent: Parent = table[-1] if table else load.cache_salt
            key = load.key(index, self.config.block_size)
            equal = fa.tree.find(parent, key)
            if equal is None:
                fa.pool.take_over(own)
                fa.tree.insert(parent, key, own)
                table.append(own)
                continue
            fa.pool.share(equal)
            fa.pool.unhold((own,))
            table.append(equal)
            num_local += num_local == index
        num_kept = end + call.reserved_block_num
        for block_id in load.reserved[end:num_kept]:
            fa.pool.take_over(block_id)
        fa.pool.unhold(reversed(load.reserved[num_kept:]))
        request = CachedRequest(
            request_id=load.request_id,
            cache_salt=load.cache_salt,
            tokens=load.tokens,
            fa_block_ids=table + load.reserved[end:num_kept],
            num_matched=len(table),
            num_cached_blocks=len(table),
            num_reserved_blocks=load.num_reserved_blocks,
            num_reserved_tokens=load.num_reserved_tokens,
            is_confirmed=True,
        )
        fa.requests[request.request_id] = request
        fa.num_set_aside += request.num_set_aside
        return Confirmed(request, num_local)

    def start_at(self, confirmed: Confirmed, endpoint: int, local_endpoint: int) -> None:
        """The endpoint is known: where the confirmed request will start."""
        request, size = confirmed.request, self.config.block_size
        if not 0 <= local_endpoint <= endpoint <= request.num_matched:
            raise InvariantViolated(f"endpoint {endpoint}, {local_endpoint} without the load: {request}")
        request.num_computed = request.num_planned = endpoint * size
        request.num_remote_tokens = (endpoint - local_endpoint) * size
        request.swa_first = self.config.first_window_block(request.num_computed)
        request.swa_end = endpoint

    # any state -> none

    def drop(self, request_id: RequestId) -> bool:
        """Give everything back; whether there was a load. Its hit counts as used just now: others may have
        gone on below it meanwhile, and a node must not be older than those."""
        load = self.fa.loads.pop(request_id, None)
        if load is None:
            return False
        self.fa.num_set_aside -= load.num_set_aside
        self.fa.pool.unhold(reversed(load.reserved))
        self.fa.tree.touch(self.fa.pool.unhold(reversed(load.pinned)))
        return True
