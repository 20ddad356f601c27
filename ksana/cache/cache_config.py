"""The numbers that the allocator and the SWA cache manager must agree on."""

from __future__ import annotations

from typing import Literal

import msgspec

SwaEviction = Literal["lfu", "lru", "lfu-aged"]


def ceil_div(a: int, b: int) -> int:
    """The smallest integer not below a / b, for b > 0."""
    return -(-a // b)


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Pool sizes and rules of one engine. `sliding_window` in tokens; None means no sliding layers."""

    block_size: int
    num_fa_blocks: int
    num_swa_blocks: int = 0
    sliding_window: int | None = None
    enable_prefix_caching: bool = True
    window_open_at_start: bool = True
    swa_eviction: SwaEviction = "lfu"
    plan_ahead: bool = True
    """Whether a step may be planned while one runs: a prefill then needs room for two chunks."""
    write_back: bool = False
    """Whether blocks that were computed are offered to a remote store (`BlocksFilled`)."""
    chain_identity: bytes = b""
    """What the KV depends on besides tokens and salt: the identity that chain keys start from."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.num_fa_blocks < 1:
            raise ValueError(f"empty cache: {self}")
        if self.sliding_window is not None and (self.sliding_window < 1 or self.num_swa_blocks < 1):
            raise ValueError(f"sliding layers without a window or a pool: {self}")

    @property
    def has_swa(self) -> bool:
        return self.sliding_window is not None

    @property
    def window_blocks(self) -> int:
        """W_blocks = ceil(W / B)."""
        return ceil_div(self.sliding_window or 0, self.block_size)

    def num_blocks_for(self, num_tokens: int) -> int:
        """FA blocks of a request whose first `num_tokens` are computed. The next token's block comes with the
        step that computes it; of the last one that is sampled, nothing is ever computed."""
        return ceil_div(num_tokens, self.block_size)

    def num_swa_peak(self, num_blocks: int, chunk_tokens: int) -> int:
        """SWA blocks that computing `num_blocks` needs at once: one window, one block, and the chunks that
        run or are planned. Never more than the pool, which start-up has found large enough for one."""
        num_chunks = 2 if self.plan_ahead else 1
        num_peak = self.window_blocks + num_chunks * ceil_div(chunk_tokens, self.block_size) + 1
        return min(num_blocks, num_peak, self.num_swa_blocks)

    def first_window_block(self, num_tokens: int) -> int:
        """First block that the next token after `num_tokens` may read in the sliding layers."""
        return max(0, num_tokens - (self.sliding_window or 0)) // self.block_size
