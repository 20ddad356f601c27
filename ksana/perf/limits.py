"""Whether a batch can be run at all, found out before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ksana.cache.cache_config import CacheConfig, ceil_div
from ksana.perf.batches import Batch
from ksana.perf.json_file import Place


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of the engine that will run the batches."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    cache: CacheConfig


def check_batches(file: Path, batches: Sequence[Batch], limits: Limits) -> None:
    """Raises ConfigError for the first batch that cannot be run: file, batch, field, and both numbers."""
    for batch in batches:
        _check(Place(file, *batch.place), batch, limits)


def _check(place: Place, batch: Batch, limits: Limits) -> None:
    requests = batch.requests
    longest = max(length for length, _ in requests)
    if longest >= limits.max_model_len:
        place.inner("sequence_len").fail(
            f"is {longest}, but a context of {limits.max_model_len} tokens leaves room for "
            f"{limits.max_model_len - 1} and the one that is sampled (max_model_len)"
        )
    if len(requests) > limits.max_num_seqs:
        place.inner("request_num").fail(
            f"makes {len(requests)} requests, but a step has {limits.max_num_seqs} at most (max_num_seqs)"
        )
    num_tokens = sum(forwarding for _, forwarding in requests)
    if num_tokens > limits.max_num_batched_tokens:
        place.inner("forwarding_token_num").fail(
            f"makes {num_tokens} tokens, but a step has {limits.max_num_batched_tokens} at most "
            "(max_num_batched_tokens)"
        )
    needed = num_fa_blocks(requests, limits.cache)
    if needed > limits.cache.num_fa_blocks:
        place.inner("sequence_len").fail(
            f"needs {needed} KV blocks of {limits.cache.block_size} tokens, but the pool has "
            f"{limits.cache.num_fa_blocks} (kv_cache_memory)"
        )
    if limits.cache.has_swa:
        needed = num_swa_blocks(requests, limits.cache, limits.max_num_batched_tokens)
        if needed > limits.cache.num_swa_blocks:
            place.inner("sequence_len").fail(
                f"needs {needed} sliding-window blocks of {limits.cache.block_size} tokens, but their pool "
                f"has {limits.cache.num_swa_blocks} (kv_cache_memory)"
            )


def fits(requests: Sequence[tuple[int, int]], limits: Limits) -> bool:
    """Whether `check_batches` would let a batch of these (sequence length, tokens computed) pass."""
    cache = limits.cache
    return (
        max(length for length, _ in requests) < limits.max_model_len
        and len(requests) <= limits.max_num_seqs
        and sum(forwarding for _, forwarding in requests) <= limits.max_num_batched_tokens
        and num_fa_blocks(requests, cache) <= cache.num_fa_blocks
        and (
            not cache.has_swa
            or num_swa_blocks(requests, cache, limits.max_num_batched_tokens) <= cache.num_swa_blocks
        )
    )


def num_fa_blocks(requests: Sequence[tuple[int, int]], cache: CacheConfig) -> int:
    return sum(cache.num_blocks_for(length) for length, _ in requests)


def num_swa_blocks(requests: Sequence[tuple[int, int]], cache: CacheConfig, token_budget: int) -> int:
    """The fewest with which `scheduling.fixed_batch` can walk through the prefixes, in order and with as many
    tokens a step as the budget has, and then take the blocks of the round."""
    walk = _SwaWalk(cache, len(requests))
    starts = [length - computed for length, computed in requests]
    while any(end < start for end, start in zip(walk.ends, starts, strict=True)):
        budget = token_budget
        step = []
        for index, start in enumerate(starts):
            num_tokens = min(budget, start - walk.ends[index])
            if num_tokens > 0:
                step.append((index, walk.ends[index] + num_tokens))
                budget -= num_tokens
        walk.take(step)
    last = [(index, length) for index, (length, _) in enumerate(requests)]
    walk.take(sorted(last, key=lambda one: starts[one[0]] == 0))
    return walk.num_needed


class _SwaWalk:
    """The books of the SWA cache manager, as far as they decide who finds room. All by request."""

    def __init__(self, cache: CacheConfig, num_requests: int) -> None:
        self._cache = cache
        self.ends = [0] * num_requests
        """Tokens that were granted."""
        self._held = [0] * num_requests
        self._reserved = [0] * num_requests
        """What a new one was let in with: set aside for it, whatever it gives back, until it asks again."""
        self.num_needed = 0

    def take(self, step: Sequence[tuple[int, int]]) -> None:
        """The blocks of a step whose tokens go up to these ends; those of the steps before are computed."""
        size = self._cache.block_size
        for index, end in enumerate(self.ends):
            if end:
                self._held[index] = max(0, ceil_div(end, size) - self._cache.first_window_block(end))
        has_new = any(self.ends[index] == 0 for index, _ in step)
        for index, end in step:
            before = self.ends[index]
            num_fresh = ceil_div(end, size) - ceil_div(before, size)
            needed = sum(self._held) + num_fresh
            if before == 0:
                needed += sum(self._set_aside())
                self._reserved[index] = num_fresh
            elif num_fresh or has_new:
                self._reserved[index] = 0
            self.num_needed = max(self.num_needed, needed)
            self._held[index] += num_fresh
            self.ends[index] = end

    def _set_aside(self) -> list[int]:
        return [max(0, wanted - held) for wanted, held in zip(self._reserved, self._held, strict=True)]
