"""A recorded run is asked again: the same prompts at the same distances, with the same ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from ksana.errors import ConfigError
from ksana.journal.requests import RecordedRequest, recorded_requests
from ksana.messages.outputs import Finished
from simulations.requests import SimRequest
from simulations.workloads.trace_files import read_trace
from tests.journal.recording import record


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("journal")
    record(directory, seed=1, num_requests=80)
    return directory


@pytest.fixture(scope="module")
def pairs(journal: Path) -> list[tuple[RecordedRequest, SimRequest]]:
    then = sorted(recorded_requests(journal), key=lambda request: request.arrival_s)
    return list(zip(then, read_trace(journal), strict=True))


def test_what_was_asked_and_when(pairs: list[tuple[RecordedRequest, SimRequest]]) -> None:
    assert len(pairs) == 80
    start_s = pairs[0][0].arrival_s
    for then, again in pairs:
        assert again.arrival_s == pytest.approx(then.arrival_s - start_s)
        assert again.prompt.token_ids() == then.prompt_token_ids
        assert again.timeout_s == pytest.approx(then.deadline_s - then.arrival_s)
        assert (again.seed, again.cache_salt) == (then.sampling.seed, then.cache_salt)


def test_how_it_ended(pairs: list[tuple[RecordedRequest, SimRequest]]) -> None:
    kinds = set()
    for then, again in pairs:
        if then.aborted_s is not None:
            kinds.add("left")
            assert again.leaves_after == len(then.output_token_ids)
        elif then.stop is not None:
            kinds.add("stop string")
            assert again.stop_after == then.stop.token_index
        elif isinstance(then.outcome, Finished) and then.outcome.reason == "stop":
            kinds.add("stop")
            assert again.num_output_tokens == then.num_output_tokens
        elif isinstance(then.outcome, Finished):
            kinds.add("length")
            assert again.num_output_tokens is None
            assert again.max_tokens == then.num_output_tokens
    assert {"left", "stop string", "length"} <= kinds


def test_a_directory_without_a_journal(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        read_trace(tmp_path)


def test_a_damaged_journal(tmp_path: Path) -> None:
    record(tmp_path, seed=1, num_requests=5)
    segment = max(tmp_path.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        read_trace(tmp_path)
