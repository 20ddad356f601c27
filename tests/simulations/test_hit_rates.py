"""Chats and traces through the real actors: invariants after every message, and sensible hit rates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ksana.errors import ConfigError
from simulations.hit_rates import FIRST_TOKEN, HitRates, Replay, all_conversations, run_replay
from simulations.toy_model import toy_model
from simulations.traces import make_conversations, read_mooncake, working_set_tokens

MODEL = toy_model(max_position=2048, sliding_window=96)
TOKENS = (FIRST_TOKEN, MODEL.spec.vocab_size)


def chats(num: int, share: float, rule: str = "lfu", seed: int = 1) -> HitRates:
    conversations = make_conversations(seed, num, token_range=TOKENS)

    async def work(replay: Replay) -> None:
        await all_conversations(replay, conversations)

    return run_replay(
        work,
        model=MODEL,
        pool_tokens=share * working_set_tokens(conversations),
        check_messages=True,
        max_model_len=1600,
        swa_eviction=rule,
    )


def test_a_pool_that_holds_everything_hits_all_that_was_seen_before() -> None:
    rates = chats(20, share=2.0)
    assert rates.num_fa_evictions == rates.num_swa_evictions == 0
    assert rates.hit_rate == rates.fa_hit_rate > 0.6


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["lfu", "lru", "lfu-aged"])
def test_small_pools(rule: str) -> None:
    rates = chats(300, share=0.1, rule=rule)
    assert rates.num_requests > 1000
    assert rates.num_fa_evictions > 1000
    assert rates.num_swa_evictions > 1000
    assert 0.2 < rates.hit_rate < rates.fa_hit_rate


def test_a_mooncake_trace_is_scaled_and_keeps_what_is_equal(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 1024, "output_length": 1, "hash_ids": [0, 7]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second = read_mooncake(path, block_size=8, first_token=3, num_tokens=250)
    assert (first.arrival_s, second.arrival_s) == (0.0, 3.0)
    assert (len(first.token_ids), len(second.token_ids)) == (18, 16)
    assert (first.max_tokens, second.max_tokens) == (8, 1)
    assert first.token_ids[:8] == second.token_ids[:8] == (3,) * 8
    assert first.token_ids[8:16] == (4, 3, 3, 3, 3, 3, 3, 3)
    assert second.token_ids[8:] == (10, 3, 3, 3, 3, 3, 3, 3)


def test_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1}\n')
    with pytest.raises(ConfigError, match="line 1"):
        list(read_mooncake(path, block_size=8, first_token=3, num_tokens=250))
