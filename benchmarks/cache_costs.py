"""What the cache costs per block, at 10,000 and at 100,000 cached blocks.

    python -m benchmarks.cache_costs

Median of several rounds, microseconds of this thread's time. Targets at 100,000: at most 2 per matched
block, 20 per allocated or evicted block, and 1.5 times the cost at 10,000. A prompt has 100 blocks of 16
tokens; token ids are compared as exactly as in the server.
"""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Callable
from typing import TypeVar

from ksana.cache.block_allocator import BlockAllocator
from ksana.cache.block_pool import BlockPool
from ksana.cache.cache_config import CacheConfig
from ksana.cache.prefix_tree import Parent, PrefixTree, token_bytes
from ksana.cache.swa_cache import SwaCache
from ksana.cache.swa_manager import SWACacheManager
from ksana.messages.base import Message
from ksana.messages.blocks import (
    AllocateRequestBlocks,
    BlocksPlanned,
    NewRequestBlocks,
    PlanBlocks,
    ReleaseRequest,
    UpdateRequestTokens,
)
from ksana.messages.remote import (
    AllocateBlocksForRemoteCache,
    ConfirmRemoteCacheLoadingResult,
    DropRemoteCacheLoading,
    GetRequestPrefixBlockNumberBeforeRemoteCacheLoading,
    PrefixBlockNumber,
    RemoteBlocksAllocated,
    RemoteLoadingConfirmed,
)
from ksana.messages.swa import FaBlock, SwaFilled

BLOCK_SIZE = 16
PATH = 100
"""Blocks of a prompt."""
WINDOW = 512
ROUNDS = 9
BATCH = 20
"""Prompts per round."""
SIZES = (10_000, 100_000)
Tokens = tuple[int, ...]
Costs = dict[str, float]
MessageT = TypeVar("MessageT", bound=Message)


def us_per_block(work: Callable[[], int]) -> float:
    """Median over the rounds; `work` returns how many blocks (or calls) it did."""
    times = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        num_blocks = work()
        times.append((time.thread_time() - start) / num_blocks * 1e6)
    return statistics.median(times)


def prompt(rng: random.Random, num_tokens: int = PATH * BLOCK_SIZE) -> Tokens:
    return tuple(rng.randrange(150_000) for _ in range(num_tokens))


def copied(tokens: Tokens) -> Tokens:
    """Equal ids in other objects, as they come from a tokenizer."""
    return tuple(array("i", tokens).tolist())


# The cores


def insert(tree: PrefixTree, pool: BlockPool, tokens: Tokens) -> None:
    ids = pool.allocate(PATH)
    parent: Parent = ""
    for i, block_id in enumerate(ids):
        tree.insert(parent, token_bytes(tokens[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]), block_id)
        parent = block_id
    tree.touch(pool.release(reversed(ids), 0))


def tree_costs(num_blocks: int) -> Costs:
    rng = random.Random(0)
    pool = BlockPool(num_blocks)
    tree = PrefixTree(pool, BLOCK_SIZE)
    prompts = [prompt(rng) for _ in range(num_blocks // PATH)]
    for tokens in prompts:
        insert(tree, pool, tokens)
    samples = [list(map(copied, rng.sample(prompts, BATCH))) for _ in range(2 * ROUNDS)]
    fresh = [prompt(rng) for _ in range(BATCH * ROUNDS)]

    def match() -> int:
        for tokens in samples.pop():
            assert len(tree.match("", token_bytes(tokens), PATH)) == PATH
        return BATCH * PATH

    def pin_and_release() -> int:
        for tokens in samples.pop():
            path = tree.match("", token_bytes(tokens), PATH)
            for block_id in path:
                pool.share(block_id)
            tree.touch(pool.release(reversed(path), 0))
        return BATCH * PATH

    def evict_and_insert() -> int:
        for _ in range(BATCH):
            tree.evict(PATH)
            insert(tree, pool, fresh.pop())
        return BATCH * PATH

    return {
        "match": us_per_block(match),
        "match, pin, release": us_per_block(pin_and_release),
        "evict, allocate, insert, release": us_per_block(evict_and_insert),
    }


def swa_costs(num_blocks: int) -> Costs:
    cache = SwaCache(
        CacheConfig(
            block_size=BLOCK_SIZE, num_fa_blocks=num_blocks, num_swa_blocks=num_blocks, sliding_window=WINDOW
        )
    )
    next_id = 0

    def write_path(hits: int) -> None:
        """The SWA blocks of one prompt, from their allocation until they wait for eviction."""
        nonlocal next_id
        blocks = [FaBlock(fa_block_id=next_id + i, generation=1) for i in range(PATH)]
        next_id += PATH
        for index, entry in enumerate(cache.allocate(0, blocks)):
            cache.fix(entry, SwaFilled(index=index, fa_block_id=entry.fa_block_id, generation=1), 0)
            for _ in range(hits):
                cache.increment_hit_count(entry.fa_block_id)
            cache.set_reclaimable(entry.fa_block_id, True)

    for _ in range(num_blocks // PATH):
        write_path(0)

    def evict_and_write() -> int:
        for _ in range(BATCH):
            write_path(1)
        return BATCH * PATH

    return {"SWA evict, allocate, fix, release": us_per_block(evict_and_write)}


def core_costs(num_blocks: int) -> Costs:
    return tree_costs(num_blocks) | swa_costs(num_blocks)


# Whole messages


class Both:
    """Allocator and, if there are sliding layers, SWA cache manager; every step is done at once."""

    def __init__(self, num_blocks: int, *, sliding: bool) -> None:
        config = CacheConfig(
            block_size=BLOCK_SIZE,
            num_fa_blocks=num_blocks,
            num_swa_blocks=num_blocks if sliding else 0,
            sliding_window=WINDOW if sliding else None,
        )
        self.sliding = sliding
        self.allocator = BlockAllocator(config)
        self.manager = SWACacheManager(config) if sliding else None
        self.step_id = 0
        self.request_id = 0

    def tell(self, message: Message, answer: type[MessageT]) -> MessageT:
        """Hand it to the allocator, and everything between the two on, until this answer comes."""
        waiting = list(self.allocator.handle(0.0, [message]))
        for address, said in waiting:
            if isinstance(said, answer):
                return said
            assert self.manager is not None, (address, said)
            for _, reply in self.manager.handle(0.0, [said]):
                waiting.extend(self.allocator.handle(0.0, [reply]))
        raise AssertionError(f"no {answer.__name__}, but {waiting}")

    def plan(
        self,
        *demands: AllocateRequestBlocks,
        updates: tuple[UpdateRequestTokens, ...] = (),
        releases: tuple[int, ...] = (),
    ) -> BlocksPlanned:
        self.step_id += 1
        message = PlanBlocks(
            pool_epoch=1,
            step_id=self.step_id,
            done_step_id=self.step_id - 1,
            token_budget=1 << 20,
            demands=demands,
            updates=updates,
            releases=tuple(ReleaseRequest(request_id=r) for r in releases),
        )
        answer = self.tell(message, BlocksPlanned)
        assert not answer.refusals, answer.refusals
        return answer

    def new(self, tokens: Tokens) -> AllocateRequestBlocks:
        self.request_id += 1
        return AllocateRequestBlocks(
            request_id=self.request_id,
            num_computed_tokens=0,
            num_tokens=len(tokens),
            new=NewRequestBlocks(token_ids=tokens),
        )

    def run(self, tokens: Tokens) -> int:
        """One request from its match to its release: how many tokens were cached."""
        [grant] = self.plan(self.new(tokens)).grants
        computed = grant.start + grant.num_tokens
        update = UpdateRequestTokens(request_id=self.request_id, token_ids=(), num_computed_tokens=computed)
        self.plan(updates=(update,), releases=(self.request_id,))
        return grant.start

    def load(self, tokens: Tokens) -> None:
        """One request whose whole prefix comes from a store; it is dropped before it runs."""
        self.request_id += 1
        request_id, num_swa = self.request_id, WINDOW // BLOCK_SIZE if self.sliding else 0
        probe = GetRequestPrefixBlockNumberBeforeRemoteCacheLoading(
            pool_epoch=1,
            request_id=request_id,
            token_ids=tokens,
            cache_salt="",
            num_reserved_tokens=len(tokens) + 1,
        )
        reserve = AllocateBlocksForRemoteCache(
            pool_epoch=1, request_id=request_id, fa_block_num=PATH, swa_block_num=num_swa
        )
        confirm = ConfirmRemoteCacheLoadingResult(
            pool_epoch=1,
            request_id=request_id,
            matched_block_index=PATH,
            matched_remote_swa_block_indexs=tuple(range(PATH - num_swa, PATH)),
            reserved_block_num=0,
        )
        self.tell(probe, PrefixBlockNumber)
        self.tell(reserve, RemoteBlocksAllocated)
        assert self.tell(confirm, RemoteLoadingConfirmed).cached_blocks == PATH
        drop = DropRemoteCacheLoading(pool_epoch=1, request_id=request_id)
        for _, said in self.allocator.handle(0.0, [drop]):
            assert self.manager is not None
            self.manager.handle(0.0, [said])


def message_costs(num_blocks: int, *, sliding: bool) -> Costs:
    rng = random.Random(0)
    both = Both(num_blocks, sliding=sliding)
    length = PATH * BLOCK_SIZE + 1
    for _ in range(num_blocks // PATH + BATCH):
        both.run(prompt(rng, length))
    cold = [prompt(rng, length) for _ in range(BATCH * ROUNDS)]
    loaded = [prompt(rng, length) for _ in range(BATCH * ROUNDS)]

    def run_cold() -> int:
        for _ in range(BATCH):
            both.run(cold.pop())
        return BATCH * PATH

    def run_warm() -> int:
        for tokens in warm:
            assert both.run(tokens) == PATH * BLOCK_SIZE
        return BATCH * PATH

    def load() -> int:
        for _ in range(BATCH):
            both.load(loaded.pop())
        return BATCH * PATH

    costs = {"cold prompt, with eviction": us_per_block(run_cold)}
    warm = [prompt(rng, length) for _ in range(BATCH)]
    for tokens in warm:
        both.run(tokens)
    costs["warm prompt"] = us_per_block(run_warm)
    costs["remote load, with eviction"] = us_per_block(load)
    costs["step of 32 decodes"] = us_per_block(decodes(both, rng))
    return costs


def decodes(both: Both, rng: random.Random) -> Callable[[], int]:
    """32 requests that go on by one token each step; a block becomes full every 16th."""
    for _ in range(32):
        both.plan(both.new(prompt(rng, 32)))
    ids = range(both.request_id - 31, both.request_id + 1)
    position = 32

    def decode() -> int:
        nonlocal position
        for _ in range(BLOCK_SIZE):
            updates = [
                UpdateRequestTokens(
                    request_id=r, token_ids=tuple(range(BLOCK_SIZE)), num_computed_tokens=position
                )
                for r in ids
                if position % BLOCK_SIZE == 0
            ]
            demands = [
                AllocateRequestBlocks(request_id=r, num_computed_tokens=position, num_tokens=1) for r in ids
            ]
            both.plan(*demands, updates=tuple(updates))
            position += 1
        return BLOCK_SIZE

    return decode


def print_table(title: str, costs: Callable[[int], Costs]) -> None:
    small, large = map(costs, SIZES)
    print(f"{title:36} {SIZES[0]:>9,} {SIZES[1]:>9,}   ratio")
    for name in small:
        print(f"  {name:34} {small[name]:9.2f} {large[name]:9.2f} {large[name] / small[name]:7.2f}")


def main() -> None:
    print("Microseconds per block, by the number of cached blocks (for decodes: per step)")
    print_table("cores", core_costs)
    print_table("messages, full layers only", lambda n: message_costs(n, sliding=False))
    print_table("messages, with sliding layers", lambda n: message_costs(n, sliding=True))


if __name__ == "__main__":
    main()
