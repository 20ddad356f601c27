"""What an engine should have done, worked out again by simpler means than its own."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ksana.cache.block_allocator import BlockAllocator
from ksana.cache.cache_config import ceil_div
from ksana.cache.prefix_tree import PrefixTree
from ksana.cache.swa_entry import SwaEntry, SwaEvictionQueue
from ksana.cache.swa_manager import SWACacheManager
from ksana.devices.simulated_worker import simulated_kv
from ksana.messages.stores import FA_KIND, SWA_KIND
from simulations.checks.promises import BrokenPromise
from simulations.engine import EngineSpec

_STEPS_END_WITHIN_S = 2.0
"""The last blocks of an ended request join the cache when the step in flight is done: in worlds that are
checked, steps are shorter than that."""
_AGES_OF_A_FLOAT = 40
"""Of the 53 that its mantissa has bits for; the rest is for how often a block is used in one."""


class PrefixOracle:
    """Which prefixes a cache that forgets nothing would have: the blocks of requests that finished."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._children: dict[tuple[int | str, tuple[int, ...]], int] = {}
        self._finished: list[tuple[float, str, tuple[int, ...]]] = []
        """Not entered yet: when, cache salt, computed tokens."""

    def finished(self, now_s: float, cache_salt: str, token_ids: tuple[int, ...]) -> None:
        """`token_ids`: those whose KV was computed."""
        self._finished.append((now_s, cache_salt, token_ids))

    def num_hit_tokens(self, now_s: float, cache_salt: str, prompt_ids: tuple[int, ...]) -> int:
        """How many leading tokens of a prompt that comes now need no computing, at least."""
        while self._finished and self._finished[0][0] + _STEPS_END_WITHIN_S < now_s:
            self._enter(*self._finished.pop(0)[1:])
        size = self._spec.block_size
        node: int | str = cache_salt
        num_blocks = 0
        for start in range(0, (len(prompt_ids) - 1) // size * size, size):
            child = self._children.get((node, prompt_ids[start : start + size]))
            if child is None:
                break
            node = child
            num_blocks += 1
        window = self._spec.sliding_window
        if window is not None and not self._spec.window_open_at_start and num_blocks < ceil_div(window, size):
            return 0
        return num_blocks * size

    def _enter(self, cache_salt: str, token_ids: tuple[int, ...]) -> None:
        size = self._spec.block_size
        node: int | str = cache_salt
        for start in range(0, len(token_ids) // size * size, size):
            key = (node, token_ids[start : start + size])
            node = self._children.setdefault(key, len(self._children))


def is_roomy(spec: EngineSpec, num_tokens: Sequence[int]) -> bool:
    """Whether requests of these lengths, prompt and answer, all fit at once and for ever."""
    blocks = sum(count // spec.block_size + 2 for count in num_tokens)
    if blocks > spec.num_fa_blocks:
        return False
    if spec.sliding_window is None:
        return True
    chunk = ceil_div(spec.max_num_batched_tokens, spec.block_size)
    peak = ceil_div(spec.sliding_window, spec.block_size) + 2 * chunk + 1
    return blocks + peak * (spec.max_num_seqs + 1) <= spec.num_swa_blocks


def most_crashes(num_suspects: int) -> int:
    """Crashes until one poisonous request among so many is found (see `ksana.scheduling.suspects`)."""
    return max(2, math.ceil(math.log2(max(1, num_suspects))) + 1)


class StoreOracle:
    """What may lie in the store: the KV of blocks of what was asked and answered, each under its name."""

    def __init__(self, identity: bytes, block_size: int) -> None:
        self._identity = identity
        self._block_size = block_size
        self._blocks: dict[bytes, bytes] = {}
        """By chain key: the simulated KV of the block."""

    def asked(self, cache_salt: str, token_ids: tuple[int, ...]) -> None:
        """`token_ids`: the prompt and all that the model would answer."""
        kv = simulated_kv(token_ids)
        for key, end in self._keys(cache_salt, token_ids):
            self._blocks[key] = kv[8 * (end - self._block_size) : 8 * end]

    def _keys(self, cache_salt: str, token_ids: tuple[int, ...]) -> Iterator[tuple[bytes, int]]:
        """The chain key of each full block, and the token it ends at."""
        size = self._block_size
        root = b"ksana kv chain 1" + _sized(self._identity) + _sized(cache_salt.encode())
        key = hashlib.sha256(root).digest()
        for start in range(0, len(token_ids) // size * size, size):
            key = hashlib.sha256(key + struct.pack(f"<{size}i", *token_ids[start : start + size])).digest()
            yield key, start + size

    def num_stored_tokens(
        self, cache_salt: str, prompt_ids: tuple[int, ...], stored: Mapping[bytes, bytes], spec: EngineSpec
    ) -> int:
        """Leading tokens of a prompt that need no computing with what is stored now."""
        size, window = spec.block_size, spec.sliding_window
        kinds = (FA_KIND,) if window is None else (FA_KIND, SWA_KIND)
        num_blocks = 0
        for key, end in self._keys(cache_salt, prompt_ids):
            if end >= len(prompt_ids) or any(key + kind not in stored for kind in kinds):
                break
            num_blocks += 1
        if window is not None and not spec.window_open_at_start and num_blocks < ceil_div(window, size):
            return 0
        return num_blocks * size

    def check(self, stored: Mapping[bytes, bytes]) -> None:
        """`stored`: values by key, each with its envelope in front."""
        for key, value in stored.items():
            expected = self._blocks.get(key[:-1])
            if expected is None:
                raise BrokenPromise(f"the store has a block {key.hex()} that no request could have filled")
            if value[-len(expected) :] != expected:
                raise BrokenPromise(f"the store has something else under {key.hex()} than its KV")


def _sized(part: bytes) -> bytes:
    return len(part).to_bytes(8, "little") + part


class EvictionWatch:
    """Compares what is evicted with a full search for what should be."""

    def __init__(self) -> None:
        self._tree: PrefixTree | None = None
        self._queue: SwaEvictionQueue | None = None

    def attach(self, allocator: BlockAllocator, manager: SWACacheManager | None) -> None:
        """Look at the pools there are now; a reset makes new ones. Cheap when they are looked at already."""
        if self._tree is not allocator.fa.tree:
            self._tree = allocator.fa.tree
            _watch_tree(allocator)
        if manager is not None and self._queue is not manager.cache._queue:
            self._queue = manager.cache._queue
            _watch_queue(self._queue)


def _watch_tree(allocator: BlockAllocator) -> None:
    tree, pool = allocator.fa.tree, allocator.fa.pool
    evict = tree.evict

    def checked(num_blocks: int) -> list[int]:
        by_age = sorted((node.last_used, block_id) for block_id, node in tree._nodes.items())
        expected = [block_id for _, block_id in by_age if pool.is_cached(block_id)][:num_blocks]
        evicted = evict(num_blocks)
        if evicted != expected:
            raise BrokenPromise(f"blocks {evicted} were evicted; least recently used were {expected}")
        return evicted

    setattr(tree, "evict", checked)  # noqa: B010 - a method, to mypy


def _watch_queue(queue: SwaEvictionQueue) -> None:
    worth = _Worth(queue)
    add, count_hit, pop = queue.add, queue.count_hit, queue.pop

    def added(entry: SwaEntry) -> None:
        worth.added(entry)
        add(entry)

    def counted(entry: SwaEntry) -> None:
        worth.used(entry)
        count_hit(entry)

    def checked() -> SwaEntry:
        queued = list(queue._queued.values())
        least = min(queued, key=worth.of, default=None)
        is_exact = all(map(worth.is_exact, queued))
        entry = pop()
        worth.num_evictions += 1
        if is_exact and entry is not least:
            raise BrokenPromise(f"{entry} was evicted; {least} is worth less")
        return entry

    setattr(queue, "add", added)  # noqa: B010
    setattr(queue, "count_hit", counted)  # noqa: B010
    setattr(queue, "pop", checked)  # noqa: B010 - methods, to mypy


class _Worth:
    """What each sliding-window block is worth to the cache, from a list of all its uses."""

    def __init__(self, queue: SwaEvictionQueue) -> None:
        self._policy = queue._policy
        self._evictions_per_age = queue._evictions_per_age
        self.num_evictions = queue.num_evictions
        self._ages: dict[int, list[int]] = {}
        """By the entry's number: the ages in which it was made and used."""
        self._added: dict[int, int] = {}
        self._clock = 0

    def _ages_of(self, entry: SwaEntry) -> list[int]:
        return self._ages.setdefault(entry.insertion, [entry.weighed_at])

    def used(self, entry: SwaEntry) -> None:
        self._ages_of(entry).append(self.num_evictions // self._evictions_per_age)

    def added(self, entry: SwaEntry) -> None:
        """Nobody uses it now."""
        self._ages_of(entry)
        self._clock += 1
        self._added[entry.insertion] = self._clock

    def is_exact(self, entry: SwaEntry) -> bool:
        """Whether a float can tell its worth, as the cache has it: oldest and newest use are near enough."""
        ages = self._ages_of(entry)
        return ages[-1] - ages[0] <= _AGES_OF_A_FLOAT

    def of(self, entry: SwaEntry) -> tuple[int, int, int]:
        """What is least goes first: by rule, then by position, then by age."""
        if self._policy == "lru":
            return self._added[entry.insertion], 0, 0
        ages = self._ages_of(entry)
        value = len(ages) if self._policy == "lfu" else sum(1 << age for age in ages)
        return value, entry.prefix_fa_block_num, entry.insertion


def leftovers(scheduler_snapshot: bytes) -> list[str]:
    """What a scheduler without work still remembers of requests, by name."""
    state = msgspec.msgpack.decode(scheduler_snapshot)
    names = ("requests", "waiting", "loading", "running", "leaving", "steps", "plan", "releases", "updates")
    return [name for name in names if state.get(name)]
