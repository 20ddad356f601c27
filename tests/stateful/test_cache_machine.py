"""Block allocator and SWA cache manager together, through messages, in every order hypothesis can think of.

What is true at the end of each story: every read of the device found the KV of the request's own prefix,
no freed block was read (freed blocks are poisoned at once), every invariant held after every message, and
when all requests have ended the pools balance.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ksana.cache.cache_config import CacheConfig
from tests.stateful.cache_world import World

PROMPTS = [tuple((i * 7 + family) % 3 for i in range(24)) for family in range(2)]
"""Prompts are beginnings of these with different ends, so that many are shared."""


def smallest_config(
    block_size: int,
    window: int | None,
    budget: int,
    max_len: int,
    *,
    extra_fa: int,
    extra_swa: int,
    plan_ahead: bool,
    **rest: Any,
) -> CacheConfig:
    """The smallest pools that start-up accepts, and some blocks more."""
    num_swa_blocks = 0
    if window is not None:
        chunks = (2 if plan_ahead else 1) * -(-budget // block_size)
        num_swa_blocks = -(-window // block_size) + chunks + 1 + extra_swa
    return CacheConfig(
        block_size=block_size,
        num_fa_blocks=-(-(max_len - 1) // block_size) + extra_fa,
        num_swa_blocks=num_swa_blocks,
        sliding_window=window,
        plan_ahead=plan_ahead,
        **rest,
    )


class CacheMachine(RuleBasedStateMachine):
    """One World; the rules are what schedulers, users and workers may do at any moment."""

    world: World

    @initialize(
        block_size=st.sampled_from([2, 4]),
        window=st.sampled_from([None, 1, 3, 4, 6, 9]),
        budget=st.sampled_from([3, 8]),
        extra_fa=st.integers(0, 12),
        extra_swa=st.integers(0, 12),
        plan_ahead=st.booleans(),
        caching=st.sampled_from([True, True, True, False]),
        window_open_at_start=st.booleans(),
        policy=st.sampled_from(["lfu", "lru", "lfu-aged"]),
    )
    def start(
        self,
        block_size: int,
        window: int | None,
        budget: int,
        extra_fa: int,
        extra_swa: int,
        plan_ahead: bool,
        caching: bool,
        window_open_at_start: bool,
        policy: Any,
    ) -> None:
        config = smallest_config(
            block_size,
            window,
            budget,
            32,
            extra_fa=extra_fa,
            extra_swa=extra_swa,
            plan_ahead=plan_ahead,
            enable_prefix_caching=caching,
            window_open_at_start=window_open_at_start,
            swa_eviction=policy,
        )
        self.world = self.make_world(config, budget)

    def make_world(self, config: CacheConfig, budget: int) -> World:
        return World(config, budget)

    @rule(
        family=st.integers(0, 1),
        length=st.integers(1, 24),
        end=st.lists(st.integers(0, 2), max_size=2),
        num_output=st.integers(1, 6),
        salt=st.sampled_from(["", "", "s"]),
    )
    def add(self, family: int, length: int, end: list[int], num_output: int, salt: str) -> None:
        self.world.add((*PROMPTS[family][:length], *end), num_output, salt)

    def can_plan(self) -> bool:
        world = self.world
        return world.open is None and len(world.in_flight) < (2 if world.config.plan_ahead else 1)

    @precondition(can_plan)
    @rule(budget=st.sampled_from([None, None, 0, 1, 2]), num_new=st.integers(0, 4), report_all=st.booleans())
    def plan(self, budget: int | None, num_new: int, report_all: bool) -> None:
        self.world.plan(budget=budget, num_new=num_new, report_all=report_all)

    @precondition(can_plan)
    @rule()
    def plan_and_settle(self) -> None:
        self.world.plan()
        self.world.settle()

    @precondition(lambda self: self.world.to_manager)
    @rule()
    def deliver_to_manager(self) -> None:
        self.world.deliver_to_manager()

    @precondition(lambda self: self.world.to_allocator and not self.world.to_manager)
    @rule()
    def deliver_to_allocator(self) -> None:
        self.world.deliver_to_allocator()

    @precondition(lambda self: self.world.in_flight and self.world.open is None)
    @rule()
    def step_done(self) -> None:
        self.world.step_done()

    @precondition(lambda self: self.world.running and self.world.open is None)
    @rule(which=st.integers(0, 10), for_good=st.booleans())
    def leave(self, which: int, for_good: bool) -> None:
        running = self.world.running
        self.world.leave(running[which % len(running)], for_good=for_good)

    @rule(luck=st.integers(0, 9))
    def reset(self, luck: int) -> None:
        if luck == 0:
            self.world.reset()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run_to_the_end()
            self.world.check_empty()


CacheMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCacheMachine = CacheMachine.TestCase


@pytest.mark.parametrize("window", [None, 4, 7])
@pytest.mark.parametrize("seed", range(4))
def test_many_conversations_in_small_pools(window: int | None, seed: int) -> None:
    """Longer than hypothesis would go: conversations that grow turn by turn, in pools too small for them."""
    rng = random.Random(seed)
    config = smallest_config(
        4,
        window,
        8,
        60,
        extra_fa=rng.randrange(20),
        extra_swa=rng.randrange(12),
        plan_ahead=seed % 2 == 0,
        swa_eviction="lfu" if seed < 2 else "lru",
    )
    world = World(config, 8)
    for _ in range(25):
        for _ in range(rng.randrange(1, 4)):
            prompt = PROMPTS[rng.randrange(2)][: rng.randrange(1, 24)]
            turns = tuple(rng.randrange(3) for _ in range(rng.randrange(0, 24)))
            world.add(prompt + turns, rng.randrange(1, 10), rng.choice(["", "", "s"]))
        for _ in range(rng.randrange(4)):
            if world.open is None and len(world.in_flight) < 2:
                world.plan()
                world.settle()
            if world.running and rng.random() < 0.3:
                world.leave(rng.choice(world.running), for_good=rng.random() < 0.5)
            while len(world.in_flight) > (1 if config.plan_ahead else 0):
                world.step_done()
    world.run_to_the_end()
    world.check_empty()
    assert world.num_messages > 100
    counters = world.last_answer.counters if world.last_answer else None
    assert counters is not None
    assert counters.num_hit_tokens > 0
