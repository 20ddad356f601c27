"""How a KV budget in bytes becomes two pools of blocks."""

from __future__ import annotations

import msgspec

from ksana.cache.cache_config import ceil_div
from ksana.errors import ConfigError

MAX_IDENTITY_BLOCKS = 1 << 20
"""FA blocks of a model without full layers cost no KV memory, only some 500 bytes on the host each."""


class PoolSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks per pool. `plan_ahead_possible`: the SWA pool holds two prefill chunks, a window and a block."""

    block_size: int
    num_fa_blocks: int
    num_swa_blocks: int
    plan_ahead_possible: bool
    fa_block_bytes: int
    swa_block_bytes: int

    @property
    def kv_bytes(self) -> int:
        """Memory that the pools take."""
        return self.num_fa_blocks * self.fa_block_bytes + self.num_swa_blocks * self.swa_block_bytes

    @property
    def max_tokens(self) -> int:
        """The longest request that fits, alone: prompt and output, of which the last token needs no KV."""
        return self.num_fa_blocks * self.block_size + 1


class _Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What one request at most needs at once."""

    block_size: int
    window_blocks: int
    chunk_blocks: int
    fa_block_bytes: int
    swa_block_bytes: int

    def fa_blocks(self, num_tokens: int) -> int:
        """All of the request's tokens but the last, which is sampled and never computed."""
        return ceil_div(max(1, num_tokens - 1), self.block_size)

    def swa_blocks(self, num_tokens: int, num_chunks: int) -> int:
        """One window, the chunks that run or are planned, and one block; or the whole request, if shorter."""
        if not self.swa_block_bytes:
            return 0
        num_blocks = self.window_blocks + num_chunks * self.chunk_blocks + 1
        return min(num_blocks, self.fa_blocks(num_tokens))

    def num_bytes(self, num_tokens: int) -> int:
        fa_bytes = self.fa_blocks(num_tokens) * self.fa_block_bytes
        return fa_bytes + self.swa_blocks(num_tokens, 1) * self.swa_block_bytes

    def longest_in(self, kv_bytes: int, max_model_len: int) -> int:
        """The largest number of tokens whose demand fits (0: none; 1 is a prompt without an answer).
        Bisection: demand grows with length."""
        low, high = 0, max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            if self.num_bytes(middle) <= kv_bytes:
                low = middle
            else:
                high = middle - 1
        return low


def plan_pools(
    *,
    kv_bytes: int,
    full_bytes_per_token: int,
    sliding_bytes_per_token: int,
    sliding_window: int | None,
    block_size: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> PoolSizes:
    """Divide `kv_bytes` between FA and SWA blocks.

    `full_bytes_per_token` and `sliding_bytes_per_token`: KV of one token over all layers of the kind
    (0: no such layers). `max_num_batched_tokens` is the largest prefill chunk.

    Raises ConfigError, with the numbers, if the SWA pool could not run one chunk, or if a request of
    max_model_len does not fit; the latter names the largest max_model_len that does.
    """
    has_sliding = sliding_window is not None and sliding_bytes_per_token > 0
    if not has_sliding and full_bytes_per_token < 1:
        raise ConfigError("the model has no layers that keep KV; nothing can be planned")
    demand = _Demand(
        block_size=block_size,
        window_blocks=ceil_div(sliding_window or 0, block_size),
        chunk_blocks=ceil_div(max_num_batched_tokens, block_size),
        fa_block_bytes=full_bytes_per_token * block_size,
        swa_block_bytes=sliding_bytes_per_token * block_size if has_sliding else 0,
    )
    _refuse_too_small(demand, kv_bytes, max_model_len, max_num_batched_tokens, sliding_window)
    num_swa = _num_swa_blocks(demand, kv_bytes, max_model_len, max_num_seqs)
    if demand.fa_block_bytes:
        num_fa = (kv_bytes - num_swa * demand.swa_block_bytes) // demand.fa_block_bytes
    else:
        per_request = demand.fa_blocks(max_model_len)
        num_fa = max(per_request, min(MAX_IDENTITY_BLOCKS, max(max_num_seqs * per_request, 4 * num_swa)))
    return PoolSizes(
        block_size=block_size,
        num_fa_blocks=num_fa,
        num_swa_blocks=num_swa,
        plan_ahead_possible=num_swa >= demand.swa_blocks(max_model_len, 2),
        fa_block_bytes=demand.fa_block_bytes,
        swa_block_bytes=demand.swa_block_bytes,
    )


def _refuse_too_small(
    demand: _Demand,
    kv_bytes: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    sliding_window: int | None,
) -> None:
    needed = demand.num_bytes(max_model_len)
    if needed <= kv_bytes:
        return
    longest = demand.longest_in(kv_bytes, max_model_len)
    advice = (
        f"the largest --max-model-len that fits is {longest}"
        if longest > 1
        else "no --max-model-len fits: one block is too large"
    )
    num_swa = demand.swa_blocks(max_model_len, 1)
    swa_bytes = num_swa * demand.swa_block_bytes
    if num_swa and swa_bytes + demand.fa_block_bytes > kv_bytes:
        raise ConfigError(
            f"the KV pool of {_mib(kv_bytes)} cannot run one prefill chunk: the sliding-window layers need "
            f"{num_swa} blocks of {demand.block_size} tokens ({_mib(swa_bytes)}) for one "
            f"chunk of {max_num_batched_tokens} tokens, one window of {sliding_window} and one block; raise "
            f"--kv-cache-memory or lower --max-num-batched-tokens; as it is, {advice}"
        )
    raise ConfigError(
        f"the KV pool of {_mib(kv_bytes)} cannot hold --max-model-len {max_model_len}, which needs "
        f"{_mib(needed)}; {advice}, or raise --kv-cache-memory"
    )


def _num_swa_blocks(demand: _Demand, kv_bytes: int, max_model_len: int, max_num_seqs: int) -> int:
    """Enough for every running request's window and the chunks, plus, for cached windows, half of what both
    pools could hold besides; no more than FA blocks (each SWA block hangs on one), and never so many that
    max_model_len does not fit."""
    if not demand.swa_block_bytes:
        return 0
    least = demand.swa_blocks(max_model_len, 1)
    fa_bytes = demand.fa_blocks(max_model_len) * demand.fa_block_bytes
    most = (kv_bytes - fa_bytes) // demand.swa_block_bytes
    if not demand.fa_block_bytes:
        return most
    per_request = min(demand.window_blocks + 2, demand.fa_blocks(max_model_len))
    running = max(demand.swa_blocks(max_model_len, 2), max_num_seqs * per_request + 2 * demand.chunk_blocks)
    even = kv_bytes // (demand.fa_block_bytes + demand.swa_block_bytes)
    wanted = running + max(0, even - running) // 2
    return max(least, min(wanted, even, most))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
