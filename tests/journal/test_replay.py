"""What a simulated engine recorded is said again by cores that are fed from the journal."""

from __future__ import annotations

from pathlib import Path

import pytest

from ksana.errors import InvariantViolated
from ksana.journal.reading import list_segments
from ksana.journal.replay import replay
from ksana.scheduling import scheduler as scheduler_module
from ksana.scheduling.scheduler import Scheduler
from tests.journal.recording import ACTORS, Run, record, request_of


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    directory = tmp_path_factory.mktemp("journal")
    return directory, record(directory, seed=3)


def test_a_rough_run_of_500_requests_replays_to_the_last_message(recorded: tuple[Path, Run]) -> None:
    directory, run = recorded
    assert run.num_ended == 500
    assert run.status.counters.num_preemptions > 0
    assert run.status.counters.num_aborted > 0
    assert run.status.counters.num_worker_losses > 0
    assert {"loaded", "partial"} <= run.status.load_outcomes.keys()
    segments = list_segments(directory)
    report = replay(segments, ACTORS)
    assert report.difference is None
    assert report.notes == []
    assert report.num_segments == len(segments) > 3
    assert report.by_actor.keys() == set(ACTORS)
    assert report.num_messages > 10_000


def test_every_segment_and_every_actor_replays_alone(recorded: tuple[Path, Run]) -> None:
    directory, _ = recorded
    segments = list_segments(directory)
    num_messages = replay(segments, ACTORS).num_messages
    alone = [replay([segment], ACTORS) for segment in segments]
    assert [report.difference for report in alone] == [None] * len(segments)
    assert sum(report.num_messages for report in alone) == num_messages
    by_actor = [replay(segments, [actor]) for actor in ACTORS]
    assert [report.difference for report in by_actor] == [None] * len(ACTORS)
    assert sum(report.num_messages for report in by_actor) == num_messages


def test_without_sliding_layers(tmp_path: Path) -> None:
    record(tmp_path, seed=2, num_requests=60, sliding_window=None)
    report = replay(list_segments(tmp_path), ACTORS)
    assert report.difference is None
    assert report.by_actor.keys() == set(ACTORS) - {"swa_cache_manager"}


@pytest.mark.parametrize("policy", ["lru", "lfu-aged"])
def test_with_other_eviction_rules(tmp_path: Path, policy: str) -> None:
    changes = {"swa_eviction": policy, "num_swa_blocks": 40}
    record(tmp_path, seed=3, num_requests=60, segment_bytes=64 << 10, changes=changes)
    segments = list_segments(tmp_path)
    assert len(segments) > 2
    assert replay(segments, ACTORS).difference is None


def test_a_subset_of_actors_may_be_recorded(tmp_path: Path) -> None:
    """What the others say to them is then in the journal in full."""
    record(tmp_path, seed=2, num_requests=60, actors=("swa_cache_manager", "scheduler"))
    report = replay(list_segments(tmp_path), ACTORS)
    assert report.difference is None
    assert report.by_actor.keys() == {"scheduler", "swa_cache_manager"}
    assert report.num_messages > 1000


def test_another_scheduler_is_told_at_its_first_other_message(
    recorded: tuple[Path, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = recorded
    segments = list_segments(directory)
    plan = scheduler_module.make_plan
    calls = 0

    def forgetful(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        made = plan(*arguments)  # type: ignore[arg-type]
        return None if calls > 100 and made is not None else made

    monkeypatch.setattr(scheduler_module, "make_plan", forgetful)
    difference = replay(segments, ACTORS).difference
    assert difference is not None
    assert difference.actor == "scheduler"
    assert difference.recorded.startswith("to block_allocator: PlanBlocks(")
    assert difference.replayed != difference.recorded
    assert difference.activation > 0
    assert difference.offset > 0


def test_a_state_that_is_restored_otherwise_is_told_at_the_next_segment(
    recorded: tuple[Path, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = recorded
    handle = Scheduler.handle

    def miscounting(self: Scheduler, *arguments: object) -> object:
        self._state.counters.num_stopped += 1
        return handle(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Scheduler, "handle", miscounting)
    difference = replay(list_segments(directory), ACTORS).difference
    assert difference is not None
    assert (difference.actor, difference.segment, difference.activation) == ("scheduler", 2, 0)
    assert "state at the end of segment 1 is another" in difference.what


def test_the_activation_in_which_a_core_raised_is_there(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        record(tmp_path, num_requests=30, before_end=lambda engine: _add_twice(engine))
    assert raised.group_contains(InvariantViolated, match="added twice")
    report = replay(list_segments(tmp_path), ACTORS)
    assert report.difference is None
    [note] = report.notes
    assert "raised, as recorded: InvariantViolated: request 31 was added twice" in note


def _add_twice(engine: object) -> None:
    for _ in range(2):
        engine.add(request_of(31, (1, 2, 3)))  # type: ignore[attr-defined]
