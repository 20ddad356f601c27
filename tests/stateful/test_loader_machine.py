"""Random lives of the remote-cache loader: answers in every order, faults, cancels, deadlines, resets."""

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

from tests.loading import world
from tests.loading.world import World

FULL = {"fa_block_bytes": 100}
SLIDING = {"fa_block_bytes": 100, "swa_block_bytes": 300, "window_blocks": 2}
ONLY_SLIDING = {"fa_block_bytes": 0, "swa_block_bytes": 300, "window_blocks": 3}

some = st.integers(0, 100)


class LoaderMachine(RuleBasedStateMachine):
    """One PrefixLoaded for each LoadPrefix, every slot in one place, no block confirmed that is not there."""

    model: dict[str, int] = FULL

    @initialize(
        seed=st.integers(0, 1 << 16),
        num_slots=st.sampled_from([4, 5, 8, 16]),
        open_at_start=st.booleans(),
        write_back=st.booleans(),
    )
    def begin(self, seed: int, num_slots: int, open_at_start: bool, write_back: bool) -> None:
        self.world = World(
            world.settings(
                **self.model,
                num_slots=num_slots,
                window_open_at_start=open_at_start,
                write_back=write_back,
            ),
            seed=seed,
        )

    @rule(request_id=st.integers(1, 5), length=st.integers(1, 60), give_up=st.floats(0.01, 6))
    def load(self, request_id: int, length: int, give_up: float) -> None:
        if not self.world.is_loading(request_id):
            self.world.load(request_id, tuple(range(length)), give_up)

    @rule(request_id=st.integers(1, 5))
    def cancel(self, request_id: int) -> None:
        self.world.cancel(request_id)

    @rule(count=st.integers(1, 5))
    def deliver(self, count: int) -> None:
        self.world.deliver(count)

    @rule(num_acts=st.integers(1, 40), share_bad=st.sampled_from([0.0, 0.0, 0.2, 0.6]))
    def bustle(self, num_acts: int, share_bad: float) -> None:
        self.world.bustle(num_acts, share_bad)

    @precondition(lambda self: self.world.to_allocator)
    @rule(refuses=st.sampled_from([False, False, False, True]))
    def allocator(self, refuses: bool) -> None:
        self.world.allocator_acts(refuses=refuses)

    @precondition(lambda self: self.world.to_worker)
    @rule()
    def worker(self) -> None:
        self.world.worker_acts()

    @precondition(lambda self: self.world.to_store)
    @rule(which=some)
    def store(self, which: int) -> None:
        self.world.store_acts(which % len(self.world.to_store))

    @precondition(lambda self: self.world.to_store)
    @rule(
        which=some,
        share=st.sampled_from([0.0, 0.7, 0.95]),
        bad=st.sampled_from(["missing", "corrupt", "failed"]),
        timed_out=st.booleans(),
    )
    def bad_store(self, which: int, share: float, bad: str, timed_out: bool) -> None:
        self.world.store_acts(
            which % len(self.world.to_store),
            share=share,
            bad=bad,
            timed_out=timed_out,  # type: ignore[arg-type]
        )

    @rule(num_blocks=st.integers(1, 5))
    def fill(self, num_blocks: int) -> None:
        self.world.fill(num_blocks)

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 2.5, 40.0]))
    def time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule()
    def timer(self) -> None:
        due_s = self.world.core.next_timer_s()
        if due_s is not None:
            self.world.pass_time(due_s - self.world.now_s)

    @precondition(lambda self: self.world.random.random() < 0.3)
    @rule()
    def restart(self) -> None:
        self.world.restart()

    @rule()
    def snapshot(self) -> None:
        self.world.snapshot()

    @precondition(lambda self: self.world.random.random() < 0.2)
    @rule()
    def rest(self) -> None:
        self.world.settle()
        self.world.check_at_rest()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()
            self.world.check_at_rest()


class SlidingMachine(LoaderMachine):
    model = SLIDING


class OnlySlidingMachine(LoaderMachine):
    model = ONLY_SLIDING


@pytest.mark.parametrize("machine", [LoaderMachine, SlidingMachine, OnlySlidingMachine])
def test_any_history(machine: type[LoaderMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
