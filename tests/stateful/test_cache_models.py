"""The prefix tree and the SWA cache, each against a naive model that is slow and obviously right."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ksana.cache.block_pool import BlockPool
from ksana.cache.cache_config import CacheConfig
from ksana.cache.prefix_tree import PrefixTree, token_bytes
from ksana.cache.swa_cache import SwaCache
from ksana.cache.swa_entry import SwaEntry
from ksana.messages.swa import FaBlock, SwaFilled

Path = tuple[str, tuple[int, ...]]
"""A node by name: salt and all tokens up to its end (one token to a block)."""


class TreeMachine(RuleBasedStateMachine):
    """Model: a list of unreferenced paths in order of last use, searched from the front for a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.tree = PrefixTree(self.pool, 1)
        self.refs: dict[Path, int] = {}
        self.order: list[Path] = []
        self.ids: dict[Path, int] = {}
        self.users: list[list[Path]] = []

    def _is_leaf(self, path: Path) -> bool:
        return not any(p[0] == path[0] and p[1][:-1] == path[1] for p in self.refs)

    def _evict(self) -> None:
        victim = next(path for path in self.order if self._is_leaf(path))
        self.order.remove(victim)
        del self.refs[victim]
        assert self.tree.evict(1) == [self.ids.pop(victim)]

    @rule(salt=st.sampled_from(["", "s"]), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def use(self, salt: str, tokens: list[int]) -> None:
        """A request matches its tokens and computes the rest, as far as blocks can be had."""
        paths = [(salt, tuple(tokens[:end])) for end in range(1, len(tokens) + 1)]
        hit = next((i for i, path in enumerate(paths) if path not in self.refs), len(paths))
        matched = self.tree.match(salt, token_bytes(tokens), len(tokens))
        assert matched == [self.ids[path] for path in paths[:hit]]
        for path in paths[:hit]:
            self.pool.share(self.ids[path])
            self.refs[path] += 1
            if path in self.order:
                self.order.remove(path)
        used = paths[:hit]
        for path in paths[hit:]:
            if not self.pool.num_free:
                if not self.order:
                    break
                self._evict()
            [block_id] = self.pool.allocate(1)
            self.tree.insert(self.ids[used[-1]] if used else salt, token_bytes(path[1][-1:]), block_id)
            self.ids[path] = block_id
            self.refs[path] = 1
            used.append(path)
        self.users.append(used)

    @precondition(lambda self: self.users)
    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        used = self.users.pop(which % len(self.users))
        self.tree.touch(self.pool.release([self.ids[path] for path in reversed(used)], 0))
        for path in reversed(used):
            self.refs[path] -= 1
            if not self.refs[path]:
                self.order.append(path)

    @precondition(lambda self: self.order)
    @rule(which=st.integers(0, 100))
    def look_and_drop(self, which: int) -> None:
        """A match that is not taken changes no order, even if something was evicted meanwhile."""
        salt, tokens = self.order[which % len(self.order)]
        pinned = self.tree.match(salt, token_bytes(tokens), len(tokens))
        for block_id in pinned:
            self.pool.share(block_id)
        others = [path for path in self.order if self.ids[path] not in pinned]
        if others:
            victim = next((path for path in others if self._is_leaf(path)), None)
            assert victim is not None
            assert self.tree.evict(1) == [self.ids.pop(victim)]
            self.order.remove(victim)
            del self.refs[victim]
        self.tree.unpin(self.pool.release(reversed(pinned), 0))

    @precondition(lambda self: self.order)
    @rule()
    def evict(self) -> None:
        self._evict()

    @invariant()
    def holds(self) -> None:
        self.pool.check()
        self.tree.check()
        assert len(self.tree) == len(self.refs)
        assert self.pool.num_cached == len(self.order)


@dataclass
class ModelEntry:
    entry: SwaEntry
    position: int
    made: int
    refs: int = 1
    fixed: bool = False
    hits: int = 0
    released: int = 0
    uses: list[int] = field(default_factory=list)
    """Ages in which it was made and hit."""


class SwaMachine(RuleBasedStateMachine):
    """Model: a list of entries, sorted anew for every eviction."""

    @initialize(policy=st.sampled_from(["lfu", "lru", "lfu-aged"]))
    def start(self, policy: Any) -> None:
        self.policy = policy
        self.cache = SwaCache(
            CacheConfig(
                block_size=1, num_fa_blocks=99, num_swa_blocks=7, sliding_window=3, swa_eviction=policy
            )
        )
        self.model: dict[int, ModelEntry] = {}
        """By FA block id; every entry has its own."""
        self.clock = 0
        self.num_evictions = 0

    def _candidates(self) -> list[int]:
        def rank(fa_id: int) -> tuple[int, int, int]:
            e = self.model[fa_id]
            value = {"lru": e.released, "lfu": e.hits, "lfu-aged": sum(2**age for age in e.uses)}
            return (value[self.policy], e.position, e.made)

        return sorted((f for f, e in self.model.items() if e.fixed and not e.refs), key=rank)

    @rule(num_blocks=st.integers(1, 4), position=st.integers(0, 5))
    def allocate(self, num_blocks: int, position: int) -> None:
        candidates = self._candidates()
        idle = 7 - len(self.model)
        assert self.cache.room == idle + len(candidates)
        if num_blocks > self.cache.room:
            return
        for victim in candidates[: max(0, num_blocks - idle)]:
            del self.model[victim]
            self.num_evictions += 1
        fa_ids = range(self.clock, self.clock + num_blocks)
        made = self.cache.allocate(position, [FaBlock(fa_block_id=f, generation=1) for f in fa_ids])
        for offset, (fa_id, entry) in enumerate(zip(fa_ids, made, strict=True)):
            self.model[fa_id] = ModelEntry(entry, position + offset, self.clock)
            self.model[fa_id].uses.append(self.num_evictions // 7)
            self.clock += 1

    def _pick(self, which: int, *, fixed: bool | None = None, referenced: bool | None = None) -> int | None:
        ids = [
            fa_id
            for fa_id, e in self.model.items()
            if fixed in (None, e.fixed) and referenced in (None, e.refs > 0)
        ]
        return ids[which % len(ids)] if ids else None

    @rule(which=st.integers(0, 100))
    def fix(self, which: int) -> None:
        fa_id = self._pick(which, fixed=False)
        if fa_id is not None:
            e = self.model[fa_id]
            filled = SwaFilled(index=e.position, fa_block_id=fa_id, generation=1)
            assert self.cache.fix(e.entry, filled, 0) is e.entry
            e.fixed = True

    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        fa_id = self._pick(which, referenced=True)
        if fa_id is not None:
            e = self.model[fa_id]
            self.cache.release([e.entry], 0)
            self.clock += 1
            e.refs -= 1
            e.released = self.clock
            if not e.fixed:
                del self.model[fa_id]

    @rule(which=st.integers(0, 100), hit=st.booleans())
    def register(self, which: int, hit: bool) -> None:
        fa_id = self._pick(which, fixed=True)
        if fa_id is not None:
            self.cache.set_reclaimable(fa_id, False)
            self.model[fa_id].refs += 1
            if hit:
                self.cache.increment_hit_count(fa_id)
                self.model[fa_id].hits += 1
                self.model[fa_id].uses.append(self.num_evictions // 7)

    @rule(which=st.integers(0, 100))
    def forget(self, which: int) -> None:
        fa_id = self._pick(which, fixed=True, referenced=False)
        if fa_id is not None:
            self.cache.forget(FaBlock(fa_block_id=fa_id, generation=1))
            del self.model[fa_id]

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        fixed = {entry.fa_block_id: entry.hit_count for entry in self.cache.fixed_entries()}
        assert fixed == {fa_id: e.hits for fa_id, e in self.model.items() if e.fixed}
        for fa_id in fixed:
            assert self.cache.is_reclaimable(fa_id) == (not self.model[fa_id].refs)


TreeMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
SwaMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTreeMachine = TreeMachine.TestCase
TestSwaMachine = SwaMachine.TestCase
