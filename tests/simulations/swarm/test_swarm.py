"""The swarm keeps its promises on the code as it is, notices what is broken, and shrinks what fails."""

from __future__ import annotations

import msgspec
import pytest

from ksana.cache.block_pool import BlockPool
from ksana.scheduling import crashes, lifecycle
from simulations.__main__ import main
from simulations.faults import BadRow, Disconnects, WorkerCrash
from simulations.requests import SimRequest
from simulations.scenario import Scenario
from simulations.swarm.shrink import shrink
from simulations.swarm.swarm import Failure, run_swarm, try_scenario
from simulations.swarm.swarm_draw import draw_scenario
from tests.simulations.worlds import request, world


def test_a_few_seeds() -> None:
    failed = run_swarm(range(25))
    assert failed is None, failed


@pytest.mark.slow
def test_many_seeds() -> None:
    failed = run_swarm(range(1000, 1400), jobs=2)
    assert failed is None, failed


def test_scenarios_are_drawn_from_the_seed_alone_and_differ() -> None:
    scenarios = [draw_scenario(seed) for seed in range(60)]
    assert scenarios == [draw_scenario(seed) for seed in range(60)]
    worlds = [scenario.world for scenario in scenarios]
    kinds = {type(fault) for drawn in worlds for fault in drawn.faults}
    assert len(kinds) >= 9
    assert {drawn.engines[0].plan_ahead for drawn in worlds} == {True, False}
    assert {drawn.store is None for drawn in worlds} == {True, False}
    assert {drawn.engines[0].sliding_window is None for drawn in worlds} == {True, False}
    for scenario in scenarios:
        scenario.check()
        again = msgspec.json.decode(msgspec.json.encode(scenario), type=Scenario)
        assert again == scenario, "a scenario can be written down"


def leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that end keep their blocks."""
    original = lifecycle.retire_leaving

    def leaky(state, settings) -> None:
        original(state, settings)
        state.releases.clear()

    monkeypatch.setattr("ksana.scheduling.scheduler.retire_leaving", leaky)


def test_a_leak_is_noticed_and_shrunk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    leak(monkeypatch)
    assert main(["swarm", "--seeds", "20", "--shrink-tries", "60"]) == 1
    out, err = capsys.readouterr()
    small = msgspec.json.decode(out, type=Scenario)
    assert "seed 0" in err
    assert len(small.requests) <= 6
    assert not small.world.faults
    assert try_scenario(small) is not None
    monkeypatch.undo()
    assert try_scenario(small) is None


def test_a_pool_that_forgets_an_owner_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def share(self: BlockPool, block_id: int) -> None:
        """As if nobody else could have the block."""
        self._num_cached -= 1
        self._num_referenced += 1
        self._owners[block_id] = 1

    monkeypatch.setattr(BlockPool, "share", share)
    failed = run_swarm(range(20))
    assert failed is not None


def test_a_lost_wake_up_in_a_crash_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything was refused, and then the worker dies: without a word of it nobody asks again."""
    original = crashes._return_to_waiting

    def silent(state, reason, act) -> None:
        num_changes = state.num_changes
        original(state, reason, act)
        state.num_changes = num_changes

    monkeypatch.setattr(crashes, "_return_to_waiting", silent)
    crowded = [drawn for drawn in map(draw_scenario, range(120)) if drawn.title.endswith("crowded")]
    failures = [failure for failure in map(try_scenario, crowded) if failure is not None]
    assert "checks.watch:watch" in {failure.checker for failure in failures}, failures


def scenario(requests: list[SimRequest], *faults) -> Scenario:
    return Scenario(world=world(*faults), requests=tuple(requests))


def test_shrinking_finds_the_one_fault_and_the_two_requests_that_matter() -> None:
    """Something fails whenever texts 3 and 7 are asked while a worker crashes."""

    def run(tried: Scenario) -> Failure | None:
        texts = {part.content_id for asked in tried.requests for part in asked.prompt.parts}
        crashes = any(isinstance(fault, WorkerCrash) for fault in tried.world.faults)
        return Failure(checker="made up", error="") if {3, 7} <= texts and crashes else None

    faults = (
        Disconnects(),
        WorkerCrash(at_s=1.0),
        WorkerCrash(at_s=2.0),
        BadRow(request=7),
        BadRow(request=2),
    )
    big = scenario([request(at_s=n, text=n, max_tokens=16) for n in range(12)], *faults)
    found = run(big)
    assert found is not None
    small = shrink(big, found, run=run)
    assert [type(fault) for fault in small.world.faults] == [WorkerCrash]
    assert [asked.prompt.parts[0].content_id for asked in small.requests] == [3, 7]
    assert all(asked.max_tokens < 16 for asked in small.requests)


def test_shrinking_renumbers_faults_of_requests() -> None:
    def run(tried: Scenario) -> Failure | None:
        for fault in tried.world.faults:
            if isinstance(fault, BadRow) and tried.requests[fault.request].prompt.parts[0].content_id == 4:
                return Failure(checker="made up", error="")
        return None

    big = scenario([request(at_s=n, text=n) for n in range(6)], BadRow(request=4))
    small = shrink(big, Failure(checker="made up", error=""), run=run)
    assert small.world.faults == (BadRow(request=0),)
    assert len(small.requests) == 1


def test_another_failure_is_not_taken_for_the_same() -> None:
    big = scenario([request(at_s=n, text=n) for n in range(6)])

    def run(tried: Scenario) -> Failure | None:
        return Failure(checker="this" if len(tried.requests) > 3 else "that", error="")

    assert len(shrink(big, Failure(checker="this", error=""), run=run).requests) == 4


def test_an_endless_loop_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_args: object) -> None:
        while True:
            pass

    monkeypatch.setattr("ksana.scheduling.scheduler.Scheduler.handle", endless)
    failure = try_scenario(draw_scenario(0), real_s=0.5)
    assert failure is not None
    assert failure.checker == "guard against endless loops"


def test_seeds_that_pass_are_said_to(capsys: pytest.CaptureFixture) -> None:
    assert main(["swarm", "--seeds", "3", "--first-seed", "5", "--jobs", "2"]) == 0
    assert capsys.readouterr().out == "3 seeds, every promise kept\n"
