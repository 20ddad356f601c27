"""Block ids of one pool: which are free, who counts on the others, and when a released one is idle again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypedDict

from ksana.errors import InvariantViolated
from ksana.messages.base import StepId
from ksana.messages.blocks import PoolUse


class BlockAllocatorGroupInterface(Protocol):
    """What the prefix tree, the allocator and the SWA cache manager need of a pool."""

    num_blocks: int

    @property
    def num_free(self) -> int: ...
    @property
    def num_cached(self) -> int: ...
    def allocate(self, num_blocks: int, *, held: bool = False) -> list[int]: ...
    def share(self, block_id: int) -> None: ...
    def release(self, block_ids: Iterable[int], until_step: StepId) -> list[int]: ...
    def step_done(self, step_id: StepId) -> list[int]: ...
    def hold(self, block_id: int) -> None: ...
    def unhold(self, block_ids: Iterable[int]) -> list[int]: ...
    def take_over(self, block_id: int) -> None: ...
    def keep(self, block_id: int) -> None: ...
    def discard(self, block_id: int) -> None: ...
    def is_cached(self, block_id: int) -> bool: ...
    def count_cached(self, block_ids: Iterable[int]) -> int: ...
    def generation(self, block_id: int) -> int: ...
    def generations(self, block_ids: Iterable[int]) -> list[int]: ...
    def reference_count(self, block_id: int) -> int: ...
    def owner_count(self, block_id: int) -> int: ...
    def holder_count(self, block_id: int) -> int: ...
    def use(self) -> PoolUse: ...
    def check_sums(self) -> None: ...
    def check(self) -> None: ...
    def snapshot(self) -> PoolSnapshot: ...
    def restore(self, snapshot: PoolSnapshot) -> None: ...


class PoolSnapshot(TypedDict):
    """A pool as plain values; every list but `free` has one entry per block."""

    done_step_id: StepId
    free: list[int]
    generations: list[int]
    owners: list[int]
    holders: list[int]
    leavers: list[int]
    kept: list[bool]
    waiting: dict[StepId, list[int]]


class BlockPool:
    """Ids 0 .. num_blocks-1, each with a generation that grows whenever the id is given out anew.

    A block has owners (requests that run), holders (remote loads, transfers, write-backs), leavers (releases
    that wait for a step in flight) and may be kept (the prefix tree or the SWA entries hold its content).
    It is in exactly one state:
      referenced  owners > 0
      held        no owner, holders > 0
      deferred    neither, leavers > 0
      cached      none of these, kept: can be evicted
      free        none of these, and on the free list
    Free blocks are given out last in, first out, starting with 0, 1, 2, ...: equal calls give equal ids.
    Cost: O(1) per block for every operation; `check` is O(num_blocks).
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.done_step_id: StepId = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._generations = [0] * num_blocks
        self._owners = [0] * num_blocks
        self._holders = [0] * num_blocks
        self._leavers = [0] * num_blocks
        self._kept = [False] * num_blocks
        self._waiting: dict[StepId, list[int]] = {}
        self._num_referenced = 0
        self._num_held = 0
        self._num_deferred = 0
        self._num_cached = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_deferred(self) -> int:
        return self._num_deferred

    @property
    def num_referenced(self) -> int:
        return self._num_referenced

    def generation(self, block_id: int) -> int:
        return self._generations[block_id]

    def generations(self, block_ids: Iterable[int]) -> list[int]:
        return [self._generations[block_id] for block_id in block_ids]

    def owner_count(self, block_id: int) -> int:
        return self._owners[block_id]

    def holder_count(self, block_id: int) -> int:
        return self._holders[block_id]

    def reference_count(self, block_id: int) -> int:
        """Owners, holders, and releases that wait for a step in flight."""
        return self._owners[block_id] + self._holders[block_id] + self._leavers[block_id]

    def is_cached(self, block_id: int) -> bool:
        """Whether the block could be evicted now."""
        return self._kept[block_id] and not (
            self._owners[block_id] or self._leavers[block_id] or self._holders[block_id]
        )

    def count_cached(self, block_ids: Iterable[int]) -> int:
        """How many of them could be evicted now."""
        owners, leavers, holders, kept = self._owners, self._leavers, self._holders, self._kept
        return sum([kept[b] and not (owners[b] or leavers[b] or holders[b]) for b in block_ids])

    def _is_idle(self, block_id: int) -> bool:
        return not (self._owners[block_id] or self._leavers[block_id] or self._holders[block_id])

    def allocate(self, num_blocks: int, *, held: bool = False) -> list[int]:
        """Take free blocks, with one owner each, or with one holder. The caller has made sure that there
        are enough."""
        if num_blocks > len(self._free):
            raise InvariantViolated(f"{num_blocks} blocks asked of a pool with {len(self._free)} free ones")
        taken = [self._free.pop() for _ in range(num_blocks)]
        counts = self._holders if held else self._owners
        for block_id in taken:
            self._generations[block_id] += 1
            counts[block_id] = 1
        if held:
            self._num_held += num_blocks
        else:
            self._num_referenced += num_blocks
        return taken

    def share(self, block_id: int) -> None:
        """Add an owner to a block that is not free."""
        if self._owners[block_id] == 0:
            if self._holders[block_id]:
                self._num_held -= 1
            elif self._kept[block_id] and not self._leavers[block_id]:
                self._num_cached -= 1
            else:
                self._wake(block_id)
            self._num_referenced += 1
        self._owners[block_id] += 1

    def hold(self, block_id: int) -> None:
        """Add a holder to a block that is not free: it is not evicted until `unhold`."""
        if not self._owners[block_id] and not self._holders[block_id]:
            self._wake(block_id)
            self._num_held += 1
        self._holders[block_id] += 1

    def _wake(self, block_id: int) -> None:
        """Somebody will count on a block that is only deferred or cached."""
        if self._leavers[block_id]:
            self._num_deferred -= 1
        elif self._kept[block_id]:
            self._num_cached -= 1
        else:
            raise InvariantViolated(f"block {block_id} is counted on while free")

    def unhold(self, block_ids: Iterable[int]) -> list[int]:
        """Drop a holder of each. Returns the blocks that became cached by this call, in the order given."""
        cached: list[int] = []
        for block_id in block_ids:
            holders = self._holders[block_id] - 1
            if holders < 0:
                raise InvariantViolated(f"block {block_id} is let go without a holder")
            self._holders[block_id] = holders
            if holders == 0 and not self._owners[block_id]:
                self._num_held -= 1
                if self._leavers[block_id]:
                    self._num_deferred += 1
                else:
                    self._settle(block_id, cached)
        return cached

    def take_over(self, block_id: int) -> None:
        """A holder becomes an owner."""
        self.share(block_id)
        self.unhold((block_id,))

    def release(self, block_ids: Iterable[int], until_step: StepId) -> list[int]:
        """Drop an owner of each block. What nobody counts on becomes cached (if kept) or free, but only
        when `until_step`, the last step that names it, is done.

        Returns the blocks that became cached by this call, in the order given.
        """
        cached: list[int] = []
        in_flight = until_step > self.done_step_id
        for block_id in block_ids:
            owners = self._owners[block_id] - 1
            if owners < 0:
                raise InvariantViolated(f"block {block_id} is released without an owner")
            self._owners[block_id] = owners
            if in_flight:
                self._leavers[block_id] += 1
                self._waiting.setdefault(until_step, []).append(block_id)
            if owners == 0:
                self._num_referenced -= 1
                if self._holders[block_id]:
                    self._num_held += 1
                elif self._leavers[block_id]:
                    self._num_deferred += 1
                elif self._kept[block_id]:
                    self._num_cached += 1
                    cached.append(block_id)
                else:
                    self._free.append(block_id)
        return cached

    def step_done(self, step_id: StepId) -> list[int]:
        """Every step up to `step_id` is done. Returns the blocks that became cached, oldest release first."""
        if step_id < self.done_step_id:
            raise InvariantViolated(f"step {self.done_step_id} was done, now only {step_id}")
        self.done_step_id = step_id
        cached: list[int] = []
        if not self._waiting:
            return cached
        for step in sorted(step for step in self._waiting if step <= step_id):
            for block_id in self._waiting.pop(step):
                self._leavers[block_id] -= 1
                if self._is_idle(block_id):
                    self._num_deferred -= 1
                    self._settle(block_id, cached)
        return cached

    def _settle(self, block_id: int, cached: list[int]) -> None:
        if self._kept[block_id]:
            self._num_cached += 1
            cached.append(block_id)
        else:
            self._free.append(block_id)

    def keep(self, block_id: int) -> None:
        """The content of a block that is counted on is worth keeping: it becomes cached, not free, when
        released."""
        if self._kept[block_id] or not (self._owners[block_id] or self._holders[block_id]):
            raise InvariantViolated(f"block {block_id} is kept twice or by nobody")
        self._kept[block_id] = True

    def discard(self, block_id: int) -> None:
        """Forget the content of a cached block: it becomes free."""
        if not self.is_cached(block_id):
            raise InvariantViolated(f"block {block_id} is discarded while counted on")
        self._kept[block_id] = False
        self._num_cached -= 1
        self._free.append(block_id)

    def use(self) -> PoolUse:
        return PoolUse(
            num_blocks=self.num_blocks,
            num_free=len(self._free),
            num_cached=self._num_cached,
            num_referenced=self._num_referenced,
            num_deferred=self._num_deferred,
            num_held=self._num_held,
        )

    def check_sums(self) -> None:
        """O(1): the states add up to the pool."""
        total = len(self._free) + self._num_cached + self._num_referenced + self._num_deferred
        if total + self._num_held != self.num_blocks:
            raise InvariantViolated(f"pool does not add up to {self.num_blocks}: {self.use()}")

    def check(self) -> None:
        """O(num_blocks): counters and free list agree with every single block."""
        self.check_sums()
        counted = [0] * self.num_blocks
        for block_ids in self._waiting.values():
            for block_id in block_ids:
                counted[block_id] += 1
        free = set(self._free)
        blocks = range(self.num_blocks)
        idle = set(filter(self._is_idle, blocks))
        held = {b for b in blocks if self._holders[b] and not self._owners[b]}
        counts = (*self._owners, *self._holders, *self._leavers, 0)
        facts: Sequence[tuple[str, bool]] = (
            ("leavers are those that wait", counted == self._leavers),
            ("waiting steps are in flight", all(step > self.done_step_id for step in self._waiting)),
            ("free list without repeats", len(free) == len(self._free)),
            ("free is idle and not kept", free == {b for b in idle if not self._kept[b]}),
            ("cached", self._num_cached == sum(self._kept[b] for b in idle)),
            ("referenced", self._num_referenced == sum(self._owners[b] > 0 for b in blocks)),
            ("held", self._num_held == len(held)),
            ("no negative counts", min(counts) >= 0),
        )
        for name, holds in facts:
            if not holds:
                raise InvariantViolated(f"block pool: not true that {name!r}; {self.use()}")

    def snapshot(self) -> PoolSnapshot:
        """The whole state as plain values, which later changes do not touch."""
        return {
            "done_step_id": self.done_step_id,
            "free": list(self._free),
            "generations": list(self._generations),
            "owners": list(self._owners),
            "holders": list(self._holders),
            "leavers": list(self._leavers),
            "kept": list(self._kept),
            "waiting": {step: list(blocks) for step, blocks in self._waiting.items()},
        }

    def restore(self, snapshot: PoolSnapshot) -> None:
        """Go on from a snapshot of a pool of the same size. Raises InvariantViolated for one that no pool of
        this size could have given."""
        self.done_step_id = snapshot["done_step_id"]
        self._free = list(snapshot["free"])
        self._generations = list(snapshot["generations"])
        self._owners, self._holders = list(snapshot["owners"]), list(snapshot["holders"])
        self._leavers, self._kept = list(snapshot["leavers"]), list(snapshot["kept"])
        self._waiting = {step: list(blocks) for step, blocks in snapshot["waiting"].items()}
        lists = (self._generations, self._owners, self._holders, self._leavers, self._kept)
        named = [self._free, *self._waiting.values()]
        if {len(values) for values in lists} != {self.num_blocks} or not all(
            0 <= block_id < self.num_blocks for block_ids in named for block_id in block_ids
        ):
            raise InvariantViolated(f"a snapshot of another pool than one of {self.num_blocks} blocks")
        blocks = range(self.num_blocks)
        idle = list(filter(self._is_idle, blocks))
        self._num_referenced = sum(self._owners[b] > 0 for b in blocks)
        self._num_held = sum(self._holders[b] > 0 and not self._owners[b] for b in blocks)
        self._num_cached = sum(self._kept[b] for b in idle)
        self._num_deferred = self.num_blocks - len(idle) - self._num_referenced - self._num_held
        self.check()
