"""What a simulated engine recorded is said again by cores that are fed from the journal."""

from __future__ import annotations

from pathlib import Path

import pytest

from ksana.journal.reading import list_segments
from ksana.journal.replay import replay
from tests.journal.recording import ACTORS, Run, record


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    directory = tmp_path_factory.mktemp("journal")
    return directory, record(directory, seed=1)


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
