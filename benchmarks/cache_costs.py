"""What the cache costs per block, at 10,000 and at 100,000 cached blocks.

    python -m benchmarks.cache_costs

Median of several rounds, microseconds. Targets at 100,000: at most 2 per matched block, 20 per allocated or
evicted block, and 1.5 times the cost at 10,000.
"""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Callable

from ksana.cache.block_allocator import BlockAllocator
from ksana.cache.block_pool import BlockPool
from ksana.cache.cache_config import CacheConfig
from ksana.cache.prefix_tree import PrefixTree, token_bytes
from ksana.cache.swa_cache import SwaCache
from ksana.cache.swa_manager import SWACacheManager
from ksana.messages.blocks import (
    AllocateRequestBlocks,
    NewRequestBlocks,
    PlanBlocks,
    ReleaseRequest,
    UpdateRequestTokens,
)
from ksana.messages.swa import FaBlock, SwaFilled

BLOCK_SIZE = 16
PATH = 100
ROUNDS = 9


def us_per_block(work: Callable[[], int]) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        num_blocks = work()
        times.append((time.thread_time() - start) / num_blocks * 1e6)
    return statistics.median(times)


def filled_tree(num_blocks: int, rng: random.Random) -> tuple[PrefixTree, BlockPool, list[tuple[int, ...]]]:
    pool = BlockPool(num_blocks)
    tree = PrefixTree(pool, BLOCK_SIZE)
    prompts = []
    for _ in range(num_blocks // PATH):
        tokens = tuple(rng.randrange(150_000) for _ in range(PATH * BLOCK_SIZE))
        prompts.append(tokens)
        insert(tree, pool, tokens)
    return tree, pool, prompts


def insert(tree: PrefixTree, pool: BlockPool, tokens: tuple[int, ...]) -> None:
    ids = pool.allocate(PATH)
    parent: int | str = ""
    for i, block_id in enumerate(ids):
        tree.insert(parent, token_bytes(tokens[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]), block_id)
        parent = block_id
    tree.touch(pool.release(reversed(ids), 0))


def measure(num_blocks: int) -> dict[str, float]:
    rng = random.Random(0)
    tree, pool, prompts = filled_tree(num_blocks, rng)

    sampled = [
        [tuple(array("i", tokens).tolist()) for tokens in rng.sample(prompts, 20)] for _ in range(ROUNDS)
    ]

    def match() -> int:
        for tokens in sampled.pop():
            assert len(tree.match("", token_bytes(tokens), PATH)) == PATH
        return 20 * PATH

    def pin_and_release() -> int:
        for tokens in sampled.pop():
            path = tree.match("", token_bytes(tokens), PATH)
            for block_id in path:
                pool.share(block_id)
            tree.touch(pool.release(reversed(path), 0))
        return 20 * PATH

    fresh = [tuple(rng.randrange(150_000) for _ in range(PATH * BLOCK_SIZE)) for _ in range(20 * ROUNDS)]

    def evict_and_insert() -> int:
        for _ in range(20):
            tree.evict(PATH)
            insert(tree, pool, fresh.pop())
        return 20 * PATH

    matched = us_per_block(match)
    sampled = [
        [tuple(array("i", tokens).tolist()) for tokens in rng.sample(prompts, 20)] for _ in range(ROUNDS)
    ]
    result = {
        "match": matched,
        "match, pin, release": us_per_block(pin_and_release),
        "evict, allocate, insert, release": us_per_block(evict_and_insert),
    }
    config = CacheConfig(
        block_size=BLOCK_SIZE, num_fa_blocks=num_blocks, num_swa_blocks=num_blocks, sliding_window=512
    )
    cache = SwaCache(config)
    for i in range(0, num_blocks, PATH):
        for entry in cache.allocate(0, [FaBlock(fa_block_id=i + j, generation=1) for j in range(PATH)]):
            cache.fix(
                entry,
                SwaFilled(index=entry.prefix_fa_block_num, fa_block_id=entry.fa_block_id, generation=1),
                0,
            )
            cache.set_reclaimable(entry.fa_block_id, True)
    next_id = num_blocks

    def swa_evict() -> int:
        nonlocal next_id
        for _ in range(20):
            blocks = [FaBlock(fa_block_id=next_id + j, generation=1) for j in range(PATH)]
            next_id += PATH
            for entry in cache.allocate(0, blocks):
                cache.fix(entry, SwaFilled(index=0, fa_block_id=entry.fa_block_id, generation=1), 0)
                cache.increment_hit_count(entry.fa_block_id)
                cache.set_reclaimable(entry.fa_block_id, True)
        return 20 * PATH

    result["SWA evict, allocate, fix, release"] = us_per_block(swa_evict)
    return result


def whole(num_blocks: int, sliding: bool) -> dict[str, float]:
    """Through messages: a prompt of PATH blocks (cold with eviction; warm), and one step of 32 decodes."""
    rng = random.Random(0)
    config = CacheConfig(
        block_size=BLOCK_SIZE,
        num_fa_blocks=num_blocks,
        num_swa_blocks=num_blocks if sliding else 0,
        sliding_window=512 if sliding else None,
    )
    allocator = BlockAllocator(config)
    manager = SWACacheManager(config) if sliding else None
    state = {"step": 0, "request": 0}

    def plan(demands=(), updates=(), releases=()):  # type: ignore[no-untyped-def]
        state["step"] += 1
        message = PlanBlocks(
            pool_epoch=1,
            step_id=state["step"],
            done_step_id=state["step"] - 1,
            token_budget=1 << 20,
            demands=tuple(demands),
            updates=tuple(updates),
            releases=tuple(ReleaseRequest(request_id=r) for r in releases),
        )
        [(to, said)] = allocator.handle(0.0, [message])
        if to != "scheduler":
            assert manager is not None
            [(_, done)] = manager.handle(0.0, [said])
            [(_, said)] = allocator.handle(0.0, [done])
        assert not said.refusals, said.refusals
        return said

    def run(tokens: tuple[int, ...]) -> int:
        state["request"] += 1
        request = state["request"]
        grant = plan(
            [
                AllocateRequestBlocks(
                    request_id=request,
                    num_computed_tokens=0,
                    num_tokens=len(tokens),
                    new=NewRequestBlocks(token_ids=tokens),
                )
            ]
        ).grants[0]
        plan(
            updates=[
                UpdateRequestTokens(
                    request_id=request, token_ids=(), num_computed_tokens=grant.start + grant.num_tokens
                )
            ],
            releases=[request],
        )
        return grant.start

    def prompt() -> tuple[int, ...]:
        return tuple(rng.randrange(150_000) for _ in range(PATH * BLOCK_SIZE + 1))

    prompts = [prompt() for _ in range(num_blocks // PATH + 20)]
    for tokens in prompts:
        run(tokens)
    cold = [prompt() for _ in range(10 * ROUNDS)]

    def run_cold() -> int:
        for _ in range(10):
            run(cold.pop())
        return 10 * PATH

    def run_warm() -> int:
        for tokens in prompts[-10:]:
            start = run(tokens)
            assert start == PATH * BLOCK_SIZE, start
        return 10 * PATH

    result = {"cold prompt with eviction": us_per_block(run_cold)}
    prompts += [prompt() for _ in range(20)]
    for tokens in prompts[-20:]:
        run(tokens)
    result["warm prompt"] = us_per_block(run_warm)
    tokens = prompt()[:32]
    first = state["request"] + 1
    for request in range(first, first + 32):
        plan(
            [
                AllocateRequestBlocks(
                    request_id=request,
                    num_computed_tokens=0,
                    num_tokens=32,
                    new=NewRequestBlocks(token_ids=(request, *tokens[1:])),
                )
            ]
        )
    position = 32

    def decode() -> int:
        nonlocal position
        for _ in range(16):
            updates = (
                [
                    UpdateRequestTokens(
                        request_id=r, token_ids=tuple(range(16)), num_computed_tokens=position
                    )
                    for r in range(first, first + 32)
                ]
                if position % 16 == 0
                else []
            )
            plan(
                [
                    AllocateRequestBlocks(request_id=r, num_computed_tokens=position, num_tokens=1)
                    for r in range(first, first + 32)
                ],
                updates,
            )
            position += 1
        return 16

    result["step of 32 decodes, each"] = us_per_block(decode)
    return result


def main() -> None:
    for name, sliding in (
        ("cores", None),
        ("messages, full layers only", False),
        ("messages, with sliding layers", True),
    ):
        print(f"{name}: microseconds per block")
        tables = [measure(n) if sliding is None else whole(n, sliding) for n in (10_000, 100_000)]
        for key in tables[0]:
            small, large = (table[key] for table in tables)
            print(f"  {key:36} 10,000: {small:7.2f}   100,000: {large:7.2f}   ratio {large / small:.2f}")


if __name__ == "__main__":
    main()
