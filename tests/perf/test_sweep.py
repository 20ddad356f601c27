"""A sweep covers what an engine can do, to its limits, and asks for nothing that it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from ksana.cache.cache_config import CacheConfig
from ksana.perf.batches import Batch
from ksana.perf.limits import Limits, check_batches
from ksana.perf.sweep import sweep_batches

USUAL = Limits(
    max_model_len=8192,
    max_num_seqs=64,
    max_num_batched_tokens=512,
    cache=CacheConfig(block_size=16, num_fa_blocks=5000),
)


def limits(**changes: int) -> Limits:
    cache = CacheConfig(
        block_size=16,
        num_fa_blocks=changes.get("fa", 5000),
        num_swa_blocks=changes.get("swa", 0),
        sliding_window=changes.get("window"),
    )
    return Limits(
        max_model_len=changes.get("length", 8192),
        max_num_seqs=changes.get("seqs", 64),
        max_num_batched_tokens=changes.get("budget", 512),
        cache=cache,
    )


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(
    "one",
    [
        USUAL,
        limits(window=512, swa=1200),
        limits(length=64, seqs=2, budget=16, fa=10),
        limits(length=2, seqs=1, budget=1, fa=1),
        limits(length=131072, seqs=256, budget=8192, fa=20000),
        limits(budget=1),
        limits(seqs=1),
    ],
)
def test_every_batch_can_be_run(one: Limits, quick: bool) -> None:
    batches = sweep_batches(one, quick=quick)
    assert batches
    check_batches(Path("sweep"), batches, one)
    assert len({batch.name for batch in batches}) == len(batches) <= 400
    assert len({batch.groups for batch in batches}) == len(batches)


def kinds(batches: list[Batch]) -> dict[str, list[Batch]]:
    found: dict[str, list[Batch]] = {"prefill": [], "late": [], "decode": [], "both": [], "several": []}
    for batch in batches:
        shape = batch.shape()
        if shape.num_prefills and shape.num_decodes:
            found["both"].append(batch)
        elif shape.num_decodes == shape.num_requests:
            found["decode"].append(batch)
        elif shape.num_requests > 1:
            found["several"].append(batch)
        else:
            found["late" if shape.num_kv_tokens else "prefill"].append(batch)
    return found


@pytest.mark.parametrize("quick", [False, True])
def test_the_axes_go_from_end_to_end(quick: bool) -> None:
    found = kinds(sweep_batches(USUAL, quick=quick))
    assert all(len(batches) >= 4 for batches in found.values()), found
    tokens = [batch.shape().num_forwarding_tokens for batch in found["prefill"]]
    assert (min(tokens), max(tokens)) == (2, 512)
    decodes = {batch.shape().num_decodes for batch in found["decode"]}
    assert {1, 64} <= decodes
    kv = [batch.shape().num_kv_tokens for batch in found["decode"]]
    assert max(kv) > 0.95 * 5000 * 16
    assert max(length for batch in found["late"] for length, _ in batch.requests) == 8191
    assert max(batch.shape().num_forwarding_tokens for batch in found["both"]) == 512
    # Prompts whose prefixes are cached read all of the pool together, more than the longest one alone.
    assert max(batch.shape().num_kv_tokens for batch in found["several"]) > 0.95 * 5000 * 16


def test_what_is_most_telling_comes_first() -> None:
    """Whoever is cut short after a few batches has been at the ends of every axis."""
    first = kinds(sweep_batches(USUAL)[:15])
    assert all(len(batches) >= 2 for batches in first.values())
    assert max(batch.shape().num_forwarding_tokens for batch in first["prefill"]) == 512
    assert max(batch.shape().num_decodes for batch in first["decode"]) == 64


def test_a_quick_sweep_is_shorter() -> None:
    whole, quick = sweep_batches(USUAL), sweep_batches(USUAL, quick=True)
    assert len(quick) < 0.6 * len(whole)
    assert len(whole) < 200
