"""Remote loading and writing back among everything else: all calls, in every state and every order.

The device's KV is a fingerprint of the tokens before it, a failed slot holds poison, and copies take their
turn among the steps; so a block that is shared too early, freed too early or bound to the wrong position
is read as wrong.
"""

from __future__ import annotations

import random
from typing import cast

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from ksana.cache.cache_config import CacheConfig
from ksana.messages.remote import (
    AllocateBlocksForRemoteCache,
    ConfirmRemoteCacheLoadingResult,
    GetRequestPrefixBlockNumberBeforeRemoteCacheLoading,
)
from tests.stateful.loading_world import Load, LoadingWorld
from tests.stateful.test_cache_machine import PROMPTS, CacheMachine, smallest_config

picks = st.lists(st.none() | st.integers(0, 2), max_size=8)


class LoadingMachine(CacheMachine):
    """CacheMachine's rules, and those of a loader that does what it likes."""

    def make_world(self, config: CacheConfig, budget: int) -> LoadingWorld:
        """Room for loads beside running requests where the budget is large; scarce pools otherwise."""
        more = 12 if budget > 3 else 0
        config = msgspec.structs.replace(
            config,
            write_back=True,
            chain_identity=b"m",
            num_fa_blocks=config.num_fa_blocks + more,
            num_swa_blocks=config.num_swa_blocks + more if config.has_swa else 0,
        )
        return LoadingWorld(config, budget)

    @property
    def loading(self) -> LoadingWorld:
        return cast(LoadingWorld, self.world)

    def _loads(self, *states: str) -> list[Load]:
        loads = self.loading.loads.values()
        return [load for load in loads if load.state in states and not load.calls]

    def _can_load(self) -> list[int]:
        world = self.loading
        busy = {*world.confirmed, *world.releases}
        if world.open is not None:
            busy.update(demand.request_id for demand in world.open.demands)
        return [request_id for request_id in world.waiting if request_id not in busy]

    @precondition(lambda self: self.world.config.enable_prefix_caching and self._can_load())
    @rule(which=st.integers(0, 10))
    def start_load(self, which: int) -> None:
        ids = self._can_load()
        self.loading.start_load(ids[which % len(ids)])

    @precondition(lambda self: self._loads("probed"))
    @rule(which=st.integers(0, 10), num_fa=st.integers(0, 9), num_swa=st.integers(0, 8))
    def allocate(self, which: int, num_fa: int, num_swa: int) -> None:
        loads = self._loads("probed")
        self.loading.allocate(loads[which % len(loads)], num_fa, num_swa)

    @precondition(lambda self: self._loads("probed", "allocated"))
    @rule(which=st.integers(0, 10), num_fa=st.integers(0, 9), num_kept=st.integers(0, 2), picked=picks)
    def confirm(self, which: int, num_fa: int, num_kept: int, picked: list[int | None]) -> None:
        loads = self._loads("probed", "allocated")
        self.loading.confirm(loads[which % len(loads)], num_fa, num_kept, picked)

    @precondition(lambda self: self._can_load() and self.world.config.enable_prefix_caching)
    @rule(
        which=st.integers(0, 10),
        num_fa=st.integers(0, 9),
        num_swa=st.integers(0, 8),
        num_kept=st.integers(0, 2),
        failed=st.none() | st.integers(0, 7),
    )
    def load_at_once(self, which: int, num_fa: int, num_swa: int, num_kept: int, failed: int | None) -> None:
        ids = self._can_load()
        self._load_at_once(ids[which % len(ids)], num_fa, num_swa, num_kept, failed)

    @precondition(lambda self: self.world.config.enable_prefix_caching)
    @rule(
        family=st.integers(0, 1),
        length=st.integers(6, 24),
        num_kept=st.integers(0, 1),
        failed=st.none() | st.integers(0, 7),
    )
    def add_and_load(self, family: int, length: int, num_kept: int, failed: int | None) -> None:
        self.world.add(PROMPTS[family][:length], 2, "")
        self._load_at_once(self.world.waiting[-1], 9, 8, num_kept, failed)

    def _load_at_once(
        self, request_id: int, num_fa: int, num_swa: int, num_kept: int, failed: int | None
    ) -> None:
        """The usual case: the last window before the endpoint comes, but for one block perhaps."""
        world = self.loading
        world.settle()
        if request_id not in self._can_load():
            return
        num_swa = min(num_swa, world.config.window_blocks)
        world.start_load(request_id)
        world.settle()
        load = world.loads.get(request_id)
        if load is None:
            return
        world.allocate(load, num_fa, num_swa)
        world.settle()
        size = world.config.block_size
        matched = min(load.end, (load.request.known - 1) // size)
        first = max(0, matched - len(load.swa_blocks))
        picked = [None if index == failed else 0 for index in range(len(load.swa_blocks))]
        if picked and picked[0] is not None:
            picked[0] = first
        world.confirm(load, len(load.fa_blocks), num_kept, picked)
        world.settle()

    @precondition(lambda self: self.loading.loads)
    @rule(which=st.integers(0, 10), for_good=st.booleans())
    def drop(self, which: int, for_good: bool) -> None:
        ids = list(self.loading.loads)
        self.loading.drop(ids[which % len(ids)], for_good=for_good)

    def _idle_confirmed(self) -> list[int]:
        planned = {demand.request_id for demand in self.world.open.demands} if self.world.open else set()
        return [request_id for request_id in self.loading.confirmed if request_id not in planned]

    @precondition(lambda self: self._idle_confirmed())
    @rule(which=st.integers(0, 10), for_good=st.booleans())
    def give_up_confirmed(self, which: int, for_good: bool) -> None:
        ids = self._idle_confirmed()
        self.loading.give_up_confirmed(ids[which % len(ids)], for_good=for_good)

    @precondition(lambda self: self.can_plan() and self._loads("probed", "allocated"))
    @rule()
    def plan_of_loading(self) -> None:
        self.loading.plan_of_loading(self._loads("probed", "allocated")[0].request.request_id)

    @precondition(lambda self: not self.world.allocator.is_batch_open)
    @rule(
        what=st.sampled_from(["probe", "allocate", "confirm", "M", "slots", "order", "R", "stale"]),
        which=st.integers(0, 10),
    )
    def bad_call(self, what: str, which: int) -> None:
        world = self.loading
        epoch, loads = world._epoch, list(world.loads.values())
        load = loads[which % len(loads)] if loads else None
        request_id = load.request.request_id if load is not None else 12345
        probe = GetRequestPrefixBlockNumberBeforeRemoteCacheLoading(
            pool_epoch=epoch, request_id=request_id, token_ids=(1, 2), cache_salt="", num_reserved_tokens=3
        )
        confirm = ConfirmRemoteCacheLoadingResult(
            pool_epoch=epoch,
            request_id=request_id,
            matched_block_index=load.fa_hit if load is not None else 0,
            matched_remote_swa_block_indexs=(-1,) * len(load.swa_blocks) if load is not None else (),
            reserved_block_num=0,
        )
        allocate = AllocateBlocksForRemoteCache(
            pool_epoch=epoch, request_id=request_id, fa_block_num=0, swa_block_num=0
        )
        if what == "stale":
            world.bad_call(msgspec.structs.replace(confirm, pool_epoch=epoch - 1))
        elif load is None:
            world.bad_call(allocate if what == "allocate" else confirm)
        elif load.calls:
            return
        elif what == "probe":
            world.bad_call(probe)
        elif what == "allocate" and load.state == "allocated":
            world.bad_call(allocate)
        elif what == "M":
            too_many = load.end + 1 if which % 2 else load.fa_hit - 1
            world.bad_call(msgspec.structs.replace(confirm, matched_block_index=too_many))
        elif what == "slots":
            slots = (*confirm.matched_remote_swa_block_indexs, -1)
            world.bad_call(msgspec.structs.replace(confirm, matched_remote_swa_block_indexs=slots))
        elif what == "order" and load.swa_blocks:
            slots = (*confirm.matched_remote_swa_block_indexs[1:], load.fa_hit)
            world.bad_call(msgspec.structs.replace(confirm, matched_remote_swa_block_indexs=slots))
        elif what == "R":
            kept = len(load.fa_blocks) + 1 if which % 2 else -1
            world.bad_call(msgspec.structs.replace(confirm, reserved_block_num=kept))

    @precondition(lambda self: self.loading.offers)
    @rule(first=st.integers(0, 50), num_blocks=st.integers(1, 4))
    def hold(self, first: int, num_blocks: int) -> None:
        offers = self.loading.offers
        self.loading.hold(offers[first % len(offers) :][:num_blocks])

    @precondition(lambda self: any(hold.is_read for hold in self.loading.holds))
    @rule(which=st.integers(0, 10))
    def release_hold(self, which: int) -> None:
        holds = [hold for hold in self.loading.holds if hold.is_read]
        self.loading.release_hold(holds[which % len(holds)])


LoadingMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLoadingMachine = LoadingMachine.TestCase


@pytest.mark.parametrize("window", [None, 4, 7])
@pytest.mark.parametrize("seed", range(4))
def test_many_loads_in_small_pools(window: int | None, seed: int) -> None:
    """Longer than hypothesis would go: requests come, load, run, are preempted and dropped."""
    rng = random.Random(seed)
    config = smallest_config(
        4,
        window,
        8,
        60,
        extra_fa=rng.randrange(15, 40),
        extra_swa=rng.randrange(10, 30),
        plan_ahead=seed % 2 == 0,
        write_back=True,
    )
    world = LoadingWorld(config, 8)
    for _ in range(100):
        prompt = PROMPTS[rng.randrange(2)][: rng.randrange(1, 24)]
        turns = tuple(rng.randrange(3) for _ in range(rng.randrange(0, 24)))
        world.add(prompt + turns, rng.randrange(1, 10), rng.choice(["", "", "s"]))
        for _ in range(rng.randrange(4)):
            _load_some(world, rng)
            if world.open is None and len(world.in_flight) < 2:
                world.plan()
            if rng.random() < 0.8:
                world.settle()
            if world.open is None and world.running and rng.random() < 0.2:
                world.leave(rng.choice(world.running), for_good=rng.random() < 0.5)
            while world.open is None and len(world.in_flight) > (1 if config.plan_ahead else 0):
                world.step_done()
    world.run_to_the_end()
    world.check_empty()
    assert world.num_confirmed > 3
    assert world.num_remote_blocks > 3
    assert world.num_read > 5


def _load_some(world: LoadingWorld, rng: random.Random) -> None:
    """One call of each load, of a new one perhaps, and something for the write-back."""
    planned = {demand.request_id for demand in world.open.demands} if world.open is not None else set()
    free = [r for r in world.waiting if r not in {*world.confirmed, *world.releases, *planned}]
    if free and len(world.loads) < 3:
        world.start_load(rng.choice(free))
    for load in list(world.loads.values()):
        if load.calls or rng.random() < 0.3:
            continue
        if load.state == "probed":
            world.allocate(load, rng.randrange(9), rng.randrange(4))
        elif load.state == "allocated":
            matched = min(load.end, (load.request.known - 1) // world.config.block_size)
            picked: list[int | None] = [0 if rng.random() < 0.9 else None for _ in load.swa_blocks]
            if picked:
                picked[0] = max(0, matched - len(picked))
            world.confirm(load, len(load.fa_blocks), rng.randrange(2), picked)
        if rng.random() < 0.05 and load.request.request_id in world.loads:
            world.drop(load.request.request_id, for_good=rng.random() < 0.5)
    if world.offers and rng.random() < 0.3:
        world.hold(world.offers[-rng.randrange(1, 4) :])
    for hold in [hold for hold in world.holds if hold.is_read]:
        world.release_hold(hold)
