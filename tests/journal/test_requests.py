"""The requests of a recorded run, read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from ksana.journal.reading import JournalError, list_segments
from ksana.journal.requests import recorded_requests, requests_of
from ksana.messages.outputs import Aborted, Finished
from tests.journal.recording import record


def test_they_are_what_was_asked_and_answered(tmp_path: Path) -> None:
    run = record(tmp_path, seed=1, num_requests=80, segment_bytes=128 << 10)
    assert len(list_segments(tmp_path)) > 1
    requests = recorded_requests(tmp_path)
    assert [request.request_id for request in requests] == list(range(1, 81))
    assert [request.prompt_token_ids for request in requests] == run.prompts
    for request in requests:
        assert request.output_token_ids == run.outputs.get(request.request_id, [])
        assert request.outcome is not None
        assert request.timing is not None
        assert request.added_s is not None
        assert request.arrival_s <= request.added_s
        if isinstance(request.outcome, Aborted):
            assert request.aborted_s is not None
        if isinstance(request.outcome, Finished) and request.outcome.stop_reason == "secret stop":
            assert request.stop is not None
            assert request.num_output_tokens == request.stop.token_index + 1
    assert any(isinstance(request.outcome, Aborted) for request in requests)
    assert any(request.stop is not None for request in requests)


def test_those_that_run_when_the_journal_begins_are_there(tmp_path: Path) -> None:
    record(tmp_path, seed=1, num_requests=80, segment_bytes=128 << 10)
    everything = {request.request_id: request for request in recorded_requests(tmp_path)}
    later = requests_of(list_segments(tmp_path)[1:])
    running = [request for request in later if request.added_s is None]
    assert running
    for request in running:
        before = everything[request.request_id]
        assert request.prompt_token_ids == before.prompt_token_ids
        assert request.output_token_ids == before.output_token_ids
        assert request.arrival_s == before.arrival_s
        assert request.outcome == before.outcome


def test_the_last_run_counts_unless_another_is_named(tmp_path: Path) -> None:
    record(tmp_path, seed=1, num_requests=10)
    record(tmp_path, seed=2, num_requests=20)
    assert len(recorded_requests(tmp_path)) == 20
    assert len(recorded_requests(tmp_path, "run1")) == 10
    with pytest.raises(JournalError, match="run9 was not recorded"):
        recorded_requests(tmp_path, "run9")


def test_without_the_scheduler_there_are_none(tmp_path: Path) -> None:
    record(tmp_path, num_requests=5, actors=("block_allocator",))
    with pytest.raises(JournalError, match="not recorded"):
        recorded_requests(tmp_path)
