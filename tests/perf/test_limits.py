"""What cannot be run is found out before; and what passes does run, to the last block."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ksana.cache.cache_config import CacheConfig
from ksana.errors import ConfigError
from ksana.perf.batches import Batch
from ksana.perf.limits import Limits, check_batches, fits, num_fa_blocks, num_swa_blocks
from ksana.perf.result import RequestGroup
from tests.scheduling.test_fixed_batch import BLOCK_SIZE, World

LIMITS = Limits(
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=32,
    cache=CacheConfig(block_size=BLOCK_SIZE, num_fa_blocks=40),
)
WINDOWED = Limits(
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=32,
    cache=CacheConfig(block_size=BLOCK_SIZE, num_fa_blocks=40, num_swa_blocks=8, sliding_window=12),
)


def batch(*entries: tuple[int, int, int]) -> Batch:
    groups = tuple(
        RequestGroup(sequence_len=length, forwarding_token_num=computed, request_num=num)
        for length, computed, num in entries
    )
    return Batch(name="b", place=("batch 'b'",), groups=groups)


@pytest.mark.parametrize(
    ("limits", "one", "what"),
    [
        (LIMITS, batch((256, 1, 1)), "sequence_len: is 256, but a context of 256 tokens leaves room for 255"),
        (LIMITS, batch((9, 1, 9)), "request_num: makes 9 requests, but a step has 8 at most"),
        (LIMITS, batch((17, 17, 1), (16, 16, 1)), "forwarding_token_num: makes 33 tokens, .* has 32 at most"),
        (LIMITS, batch((81, 1, 4)), "sequence_len: needs 44 KV blocks of 8 tokens, but the pool has 40"),
        (WINDOWED, batch((60, 1, 4)), "needs .* sliding-window blocks of 8 tokens, but their pool has 8"),
    ],
)
def test_what_is_too_much_is_said(limits: Limits, one: Batch, what: str) -> None:
    with pytest.raises(ConfigError, match=f"b.json: batch 'b': .*{what}") as caught:
        check_batches(Path("b.json"), [batch((5, 1, 1)), one], limits)
    assert "\n" not in str(caught.value)
    assert not fits(one.requests, limits)


def test_what_just_fits_passes() -> None:
    batches = [batch((255, 1, 1)), batch((9, 1, 8)), batch((16, 16, 2)), batch((80, 1, 4))]
    check_batches(Path("b.json"), batches, LIMITS)
    assert all(fits(one.requests, LIMITS) for one in batches)


requests = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=4).map(
    lambda drawn: [(length, min(length, computed)) for length, computed in drawn]
)


@given(requests=requests, window=st.sampled_from([None, 5, 12, 16, 40]), budget=st.integers(8, 64))
@settings(max_examples=60)
def test_a_pool_of_exactly_so_many_blocks_is_enough_and_fewer_are_not(
    requests: list[tuple[int, int]], window: int | None, budget: int
) -> None:
    """Against the real allocators, which hold the pools to the block."""
    budget = max(budget, sum(computed for _, computed in requests))
    cache = CacheConfig(
        block_size=BLOCK_SIZE, num_fa_blocks=1, num_swa_blocks=1 if window else 0, sliding_window=window
    )
    fa = num_fa_blocks(requests, cache)
    swa = num_swa_blocks(requests, cache, budget) if window is not None else 0
    batch = [(number, *request) for number, request in enumerate(requests, 1)]

    def is_ready(fa: int, swa: int) -> bool:
        world = World(num_fa_blocks=fa, num_swa_blocks=swa, window=window, budget=budget)
        world.add(*batch)
        world.run()
        return bool(world.ready)

    assert is_ready(fa, swa)
    if fa > 1:
        assert not is_ready(fa - 1, swa)
    if swa > 1 and len(requests) == 1:  # of several, one that is refused may find room a step later
        assert not is_ready(fa, swa - 1)
