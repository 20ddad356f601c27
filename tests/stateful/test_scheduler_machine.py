"""Random lives: requests, aborts, stop strings, deadlines, crashes and bad rows in any order of delivery.

The real scheduler, block allocator and SWA cache manager; the worker's KV is checked at every row.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ksana.messages.outputs import Aborted, Failed, Finished
from ksana.messages.requests import Abort, Drain, StopStringFound
from tests.scheduling.world import ACTORS, BLOCK_SIZE, EOS, World

SHARED = tuple(range(500, 524))


class SchedulerMachine(RuleBasedStateMachine):
    """Every request ends exactly once with exactly its tokens, pools balance, nothing hangs."""

    window: int | None = None
    has_loader = False
    real_loader = False

    @initialize(
        num_blocks=st.integers(6, 24),
        extra_swa=st.integers(0, 8),
        budget=st.sampled_from([4, 7, 16, 64]),
        num_seqs=st.integers(1, 6),
        plan_ahead=st.booleans(),
        prefix_caching=st.booleans(),
        loader_seed=st.integers(0, 1 << 16),
        admission=st.sampled_from(["room_to_grow", "whole_prompt", "first_chunk"]),
        hold_when_short=st.booleans(),
    )
    def begin(
        self,
        num_blocks: int,
        extra_swa: int,
        budget: int,
        num_seqs: int,
        plan_ahead: bool,
        prefix_caching: bool,
        loader_seed: int,
        admission: str,
        hold_when_short: bool,
    ) -> None:
        self.world = World(
            num_blocks=num_blocks,
            window=self.window,
            # two chunks, a window and a block, rounded up
            num_swa_blocks=2 * (budget // 4 + 1) + (self.window or 0) // 4 + 2 + extra_swa,
            prefix_caching=prefix_caching or self.has_loader,
            loader_seed=loader_seed if self.has_loader else None,
            real_loader=self.real_loader,
            max_num_batched_tokens=budget,
            max_num_seqs=num_seqs,
            max_model_len=num_blocks * 4,
            plan_ahead=plan_ahead,
            admission=admission,
            hold_when_short=hold_when_short,
        )
        self.world.store.fill(SHARED, BLOCK_SIZE)
        self.next_id = 1
        self.stopped: dict[int, int] = {}
        self.aborted: set[int] = set()
        self.poisonous: set[int] = set()
        self.num_kills: int = 0
        self.drained = False
        self.world.poison = lambda row: row.request_id in self.poisonous and row.start >= 3

    def alive(self) -> list[int]:
        return [i for i in self.world.added if i not in self.world.ended]

    @rule(
        shared=st.integers(0, 24),
        own=st.integers(0, 12),
        max_tokens=st.integers(1, 40),
        end=st.none() | st.integers(0, 20),
        min_tokens=st.integers(0, 3),
        timeout=st.sampled_from([1e9, 1e9, 30.0]),
        fate=st.sampled_from(["good"] * 12 + ["bad row", "poisonous"]),
    )
    def add(
        self,
        shared: int,
        own: int,
        max_tokens: int,
        end: int | None,
        min_tokens: int,
        timeout: float,
        fate: str,
    ) -> None:
        request_id = self.next_id
        self.next_id += 1
        prompt = SHARED[:shared] + tuple(100_000 + request_id * 1000 + i for i in range(own))
        if end is not None:
            self.world.ends[request_id] = end
        if fate == "bad row":
            self.world.errors[request_id] = "not finite"
        if fate == "poisonous":
            self.poisonous.add(request_id)
        self.world.add(
            request_id,
            prompt=prompt,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            deadline_s=self.world.now_s + timeout,
        )

    @rule(name=st.sampled_from(ACTORS), at_once=st.booleans())
    def deliver(self, name: str, at_once: bool) -> None:
        self.world.deliver(name, at_once)

    @precondition(lambda self: self.has_loader)
    @rule()
    def end_write_back(self) -> None:
        self.world.write_back_ends()

    @rule(count=st.integers(1, 60))
    def go_on(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.alive()))
        self.aborted.add(request_id)
        self.world.tell(Abort(request_id=request_id))
        assert request_id in self.world.ended

    @precondition(lambda self: any(self.world.tokens.get(i) for i in self.alive()))
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from([i for i in self.alive() if self.world.tokens.get(i)]))
        token_index = data.draw(st.integers(0, len(self.world.tokens[request_id]) - 1))
        self.stopped[request_id] = token_index
        self.world.tell(StopStringFound(request_id=request_id, token_index=token_index, stop_string="x"))

    @rule(seconds=st.sampled_from([1.0, 10.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.world.advance(seconds)

    @precondition(lambda self: self.world.worker is not None)
    @rule()
    def kill(self) -> None:
        self.num_kills += 1
        self.world.crash()

    @precondition(lambda self: self.world.worker is None)
    @rule()
    def restart(self) -> None:
        self.world.start_worker()

    @precondition(lambda self: len(self.world.added) > 12)
    @rule()
    def drain(self) -> None:
        self.drained = True
        self.world.tell(Drain())
        assert not self.alive()

    @rule()
    def snapshot(self) -> None:
        self.world.scheduler.restore(self.world.scheduler.snapshot())

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        if world.worker is None:
            world.start_worker()
        world.run(max_events=30_000)
        world.check_quiet()
        for request_id in world.added:
            self.check_ending(request_id)

    def check_ending(self, request_id: int) -> None:
        """Tokens as scripted from the first on, and an outcome that something explains."""
        world = self.world
        ended = world.ended[request_id]
        tokens = world.tokens.get(request_id, [])
        expected = world.expected_tokens(request_id)
        assert tokens == expected[: len(tokens)]
        num_prompt_tokens = len(world.added[request_id].prompt_token_ids)
        assert ended.usage.num_prompt_tokens == num_prompt_tokens
        assert ended.usage.num_cached_tokens < max(1, num_prompt_tokens)
        if request_id in self.stopped:
            assert ended.outcome == Finished(reason="stop", stop_reason="x")
            assert ended.usage.num_output_tokens == self.stopped[request_id] + 1
            return
        assert ended.usage.num_output_tokens == len(tokens)
        if isinstance(ended.outcome, Finished):
            assert tokens == expected
            assert ended.outcome.reason == ("stop" if tokens[-1] == EOS else "length")
        elif isinstance(ended.outcome, Aborted):
            assert request_id in self.aborted
        else:
            self.check_failure(request_id, ended.outcome)

    def check_failure(self, request_id: int, outcome: Failed) -> None:
        world = self.world
        message = world.added[request_id]
        if outcome.status == 504:
            assert message.deadline_s <= world.now_s
        elif outcome.status == 503:
            assert self.drained
        elif outcome.status == 400:
            assert not 0 < len(message.prompt_token_ids) < world.scheduler.settings.max_model_len
        elif outcome.code == "computation_failed":
            assert request_id in world.errors
        else:
            assert outcome.code == "worker_lost", outcome
            assert request_id in self.poisonous or self.num_kills >= 1


class WindowMachine(SchedulerMachine):
    """The same with sliding layers, whose pool may be the scarce one."""

    window = 10


class LoadingMachine(SchedulerMachine):
    """The same with a remote store that has all, some or nothing."""

    has_loader = True


class LoadingWindowMachine(SchedulerMachine):
    """Both."""

    window = 10
    has_loader = True


class RealLoaderMachine(LoadingMachine):
    """With the real loader, over a store that may fail."""

    real_loader = True


class RealLoaderWindowMachine(LoadingWindowMachine):
    """All that there is."""

    real_loader = True


MACHINES = pytest.mark.parametrize(
    "machine",
    [
        SchedulerMachine,
        WindowMachine,
        LoadingMachine,
        LoadingWindowMachine,
        RealLoaderMachine,
        RealLoaderWindowMachine,
    ],
)


def live(machine: type[SchedulerMachine], num_lives: int) -> None:
    config = settings(
        max_examples=num_lives,
        stateful_step_count=60,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    run_state_machine_as_test(machine, settings=config)


@MACHINES
def test_some_lives(machine: type[SchedulerMachine]) -> None:
    live(machine, 60)


@pytest.mark.slow
@MACHINES
def test_many_lives(machine: type[SchedulerMachine]) -> None:
    live(machine, 1000)
