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
    """The most that are in use at once while `scheduling.fixed_batch` walks through the prefixes, in order
    and with as many tokens a step as the budget has, and then takes those of the round."""
    size = cache.block_size
    ends = [0] * len(requests)
    held = [0] * len(requests)
    most = 0

    def take(index: int, end: int) -> None:
        """Before the tokens are computed, the window still lies before them."""
        held[index] = ceil_div(end, size) - cache.first_window_block(ends[index])
        ends[index] = end

    while any(end < length - forwarding for end, (length, forwarding) in zip(ends, requests, strict=True)):
        budget = token_budget
        for index, (length, forwarding) in enumerate(requests):
            num_tokens = min(budget, length - forwarding - ends[index])
            if num_tokens > 0:
                take(index, ends[index] + num_tokens)
                budget -= num_tokens
        most = max(most, sum(held))
        held = [max(0, ceil_div(end, size) - cache.first_window_block(end)) if end else 0 for end in ends]
    for index, (length, _) in enumerate(requests):
        take(index, length)
    return max(most, sum(held))
