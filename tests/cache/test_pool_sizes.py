"""From bytes to blocks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana.cache.pool_sizes import PoolSizes, plan_pools
from ksana.errors import ConfigError

MODEL: dict[str, Any] = {
    "full_bytes_per_token": 100,
    "sliding_bytes_per_token": 500,
    "sliding_window": 60,
    "block_size": 16,
    "max_model_len": 1000,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 4,
}
"""One window is 4 blocks, one chunk 8; an FA block has 1,600 bytes, an SWA block 8,000."""

LONGEST_FA = 63 * 1600


def plan(kv_bytes: int, **changes: Any) -> PoolSizes:
    return plan_pools(kv_bytes=kv_bytes, **{**MODEL, **changes})


def test_without_sliding_layers_all_is_fa() -> None:
    sizes = plan(1_000_000, sliding_bytes_per_token=0, sliding_window=None)
    assert (sizes.num_fa_blocks, sizes.num_swa_blocks, sizes.plan_ahead_possible) == (625, 0, True)


def test_one_chunk_one_window_one_block_is_the_least() -> None:
    sizes = plan(LONGEST_FA + 13 * 8000)
    assert (sizes.num_fa_blocks, sizes.num_swa_blocks, sizes.plan_ahead_possible) == (63, 13, False)
    with pytest.raises(ConfigError, match="largest --max-model-len that fits is 993"):
        plan(LONGEST_FA + 13 * 8000 - 1)


def test_two_chunks_allow_planning_ahead() -> None:
    assert not plan(LONGEST_FA + 21 * 8000 - 1).plan_ahead_possible
    assert plan(LONGEST_FA + 21 * 8000).plan_ahead_possible


def test_the_largest_length_that_fits_does_fit() -> None:
    kv_bytes = 150_000
    with pytest.raises(ConfigError, match=r"--max-model-len 1000.* is 449") as error:
        plan(kv_bytes)
    assert "--kv-cache-memory" in str(error.value)
    assert plan(kv_bytes, max_model_len=449).max_tokens >= 449
    with pytest.raises(ConfigError):
        plan(kv_bytes, max_model_len=450)


def test_a_pool_below_one_chunk_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"13 blocks of 16 tokens .* chunk of 128 tokens, one window of 60"):
        plan(13 * 8000 + 1599)


def test_short_contexts_need_no_whole_window() -> None:
    sizes = plan(3 * 9600, max_model_len=49)
    assert (sizes.num_fa_blocks, sizes.num_swa_blocks, sizes.plan_ahead_possible) == (3, 3, True)


def test_swa_gets_room_for_running_windows_and_for_cache() -> None:
    sizes = plan(10_000_000)
    running = 4 * (4 + 2) + 2 * 8
    assert running < sizes.num_swa_blocks < sizes.num_fa_blocks


def test_all_sliding_models_have_fa_blocks_without_memory() -> None:
    sizes = plan(1_000_000, full_bytes_per_token=0)
    assert (sizes.fa_block_bytes, sizes.num_swa_blocks) == (0, 125)
    assert sizes.num_fa_blocks == 500
    assert plan(1_000_000, full_bytes_per_token=0, max_model_len=100_000).num_fa_blocks == 25_000


@pytest.mark.parametrize("sliding", [0, 500])
@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_a_length_that_fills_the_pool_to_the_token_fits_and_one_more_does_not(
    sliding: int, block_size: int
) -> None:
    """The last token needs no KV: 160 + 161 tokens need 20 blocks of 16."""
    block_bytes = block_size * (100 + sliding)
    for num_blocks in (1, 2, 20):
        longest = num_blocks * block_size + 1
        assert longest == 321 or (num_blocks, block_size) != (20, 16)
        changes: dict[str, Any] = {
            "sliding_bytes_per_token": sliding,
            "sliding_window": 100_000,
            "block_size": block_size,
            "max_num_batched_tokens": 100_000,
        }
        sizes = plan(num_blocks * block_bytes, max_model_len=longest, **changes)
        assert (sizes.num_fa_blocks, sizes.max_tokens) == (num_blocks, longest)
        assert sizes.num_swa_blocks == (num_blocks if sliding else 0)
        with pytest.raises(ConfigError, match=f"the largest --max-model-len that fits is {longest}"):
            plan(num_blocks * block_bytes, max_model_len=longest + 1, **changes)
        with pytest.raises(ConfigError):
            plan(num_blocks * block_bytes - 1, max_model_len=longest, **changes)


def test_a_pool_below_one_block_is_refused_and_nothing_is_said_of_windows_that_there_are_not() -> None:
    with pytest.raises(ConfigError, match="no --max-model-len fits: one block is too large") as error:
        plan(1, sliding_bytes_per_token=0, sliding_window=None)
    assert "window" not in str(error.value)


def test_a_model_without_kv_is_refused() -> None:
    with pytest.raises(ConfigError, match="no layers"):
        plan(1_000_000, full_bytes_per_token=0, sliding_window=None)


@given(
    kv_bytes=st.integers(1, 5_000_000),
    full=st.integers(0, 200),
    window=st.integers(1, 300),
    block_size=st.sampled_from([8, 16, 64]),
    max_model_len=st.integers(1, 5000),
    chunk=st.integers(1, 1000),
    seqs=st.integers(1, 64),
)
def test_what_is_planned_fits_and_holds_what_is_promised(
    kv_bytes: int, full: int, window: int, block_size: int, max_model_len: int, chunk: int, seqs: int
) -> None:
    try:
        sizes = plan(
            kv_bytes,
            full_bytes_per_token=full,
            sliding_window=window,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=chunk,
            max_num_seqs=seqs,
        )
    except ConfigError:
        return
    assert sizes.kv_bytes <= kv_bytes
    assert sizes.max_tokens >= max_model_len
    least = -(-window // block_size) + -(-chunk // block_size) + 1
    assert sizes.num_swa_blocks >= min(least, -(-max(1, max_model_len - 1) // block_size))
