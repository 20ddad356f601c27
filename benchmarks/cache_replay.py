"""Hit rates of the eviction rules for sliding-window blocks, on chats and on a recorded trace.

    python -m benchmarks.cache_replay [--conversations 2000] [--mooncake mooncake_conversation.jsonl]
                                      [--pools 5,10,25] [--check]

The real scheduler, block allocator and SWA cache manager run on a virtual clock; the simulated device
checks the content of every block that is read. Pools are given in percent of the working set. The trace
is scaled so that one block stands for its 512 tokens; its sliding window is 4,096 tokens. `--check` holds
the cache's invariants after every message.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ksana.models.spec import ModelSpec
from simulations.hit_rates import FIRST_TOKEN, HitRates, Replay, all_conversations, run_replay
from simulations.toy_model import toy_model
from simulations.traces import TraceRequest, make_conversations, read_mooncake, working_set_tokens

RULES = ("lfu", "lru", "lfu-aged")
_SCALED_BLOCK = 8
"""Tokens here for a 512-token block of the trace."""
_SCALED_WINDOW = 8 * _SCALED_BLOCK


def print_table(title: str, run: Callable[[str, float], HitRates], pools: Sequence[int]) -> None:
    print(title)
    print(
        f"{'pool':>6} {'rule':>9} {'hit rate':>9} {'FA only':>8} {'evicted FA':>11} {'SWA':>9} {'seconds':>8}"
    )
    for percent in pools:
        for rule in RULES:
            start = time.perf_counter()
            rates = run(rule, percent / 100)
            print(
                f"{percent:>5}% {rule:>9} {rates.hit_rate:9.3f} {rates.fa_hit_rate:8.3f} "
                f"{rates.num_fa_evictions:11,} {rates.num_swa_evictions:9,} "
                f"{time.perf_counter() - start:8.1f}",
                flush=True,
            )


def replay_conversations(num: int, seed: int, pools: Sequence[int], check: bool) -> None:
    model = toy_model(max_position=2048, sliding_window=96)
    conversations = make_conversations(seed, num, token_range=_tokens_of(model.spec))
    working_set = working_set_tokens(conversations)

    async def work(replay: Replay) -> None:
        await all_conversations(replay, conversations)

    def run(rule: str, share: float) -> HitRates:
        return run_replay(
            work,
            model=model,
            pool_tokens=share * working_set,
            check_messages=check,
            max_model_len=1600,
            swa_eviction=rule,
        )

    title = f"{num} conversations, {working_set:,} tokens, block 16, window 96, two of three layers sliding"
    print_table(title, run, pools)


def replay_mooncake(path: Path, limit: int | None, pools: Sequence[int], check: bool) -> None:
    model = toy_model(max_position=4096, sliding_window=_SCALED_WINDOW)
    first, end = _tokens_of(model.spec)
    trace: list[TraceRequest] = list(
        read_mooncake(path, block_size=_SCALED_BLOCK, first_token=first, num_tokens=end - first, limit=limit)
    )
    blocks = {
        request.token_ids[i : i + _SCALED_BLOCK]
        for request in trace
        for i in range(0, len(request.token_ids), _SCALED_BLOCK)
    }
    working_set = len(blocks) * _SCALED_BLOCK
    settings: dict[str, Any] = {
        "check_messages": check,
        "max_model_len": 4096,
        "block_size": _SCALED_BLOCK,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 1024,
    }

    async def work(replay: Replay) -> None:
        await replay.follow(trace)

    def run(rule: str, share: float) -> HitRates:
        return run_replay(work, model=model, pool_tokens=share * working_set, swa_eviction=rule, **settings)

    print_table(
        f"{path.name}: {len(trace):,} requests, {len(blocks):,} distinct blocks, window 4,096", run, pools
    )


def _tokens_of(spec: ModelSpec) -> tuple[int, int]:
    return FIRST_TOKEN, spec.vocab_size


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cache_replay", description=__doc__)
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mooncake", type=Path, help="a Mooncake trace (JSON lines)")
    parser.add_argument("--limit", type=int, help="only so many requests of the trace")
    parser.add_argument("--pools", default="5,10,25", help="pool sizes in percent of the working set")
    parser.add_argument("--check", action="store_true", help="check invariants after every message")
    options = parser.parse_args()
    pools = [int(percent) for percent in options.pools.split(",")]
    if options.conversations:
        replay_conversations(options.conversations, options.seed, pools, options.check)
    if options.mooncake is not None:
        replay_mooncake(options.mooncake, options.limit, pools, options.check)


if __name__ == "__main__":
    main()
