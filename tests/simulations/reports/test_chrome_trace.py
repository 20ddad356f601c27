"""The trace of a run: slices that nest and balance, and no more of them than a viewer takes."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from simulations.reports import chrome_trace as module
from simulations.reports.chrome_trace import chrome_trace
from simulations.reports.metrics import RunRecord
from tests.simulations.records import made_up_run

Event = dict[str, Any]


def events_of(record: RunRecord, phase: str) -> list[Event]:
    return [event for event in json.loads(chrome_trace(record))["traceEvents"] if event["ph"] in phase]


def test_every_request_is_a_slice_with_its_phases_inside() -> None:
    by_request: dict[int, list[Event]] = defaultdict(list)
    for event in events_of(made_up_run(), "be"):
        by_request[event["id"]].append(event)
    assert len(by_request) == 40
    for index, events in by_request.items():
        names = [(event["ph"], event["name"]) for event in events]
        phases = [(ph, name) for name in ("queued", "prefill", "decode") for ph in "be"]
        assert names == [("b", "request"), *phases, ("e", "request")]
        times = [event["ts"] for event in events]
        assert times == sorted(times)
        assert times[0] == 1e6 * index
        assert times[2] == pytest.approx(1e6 * index + 1e5)
        assert {event["pid"] for event in events} == {1 + index % 2}


def test_a_request_that_never_ran_is_queued_to_its_end() -> None:
    record = made_up_run(num_requests=1)
    (request,) = record.requests
    request.scheduled_s = request.first_token_s = request.last_token_s = request.ended_s = None
    request.ending = ""
    events = events_of(record, "be")
    assert [event["name"] for event in events] == ["request", "queued", "queued", "request"]
    assert events[-1]["ts"] == pytest.approx(1e6 * record.virtual_s)
    assert events[0]["args"]["ending"] == "never ended"


def test_steps_samples_and_faults() -> None:
    record = made_up_run()
    steps = events_of(record, "X")
    assert len(steps) == 80
    assert steps[0]["name"] == "prefill"
    assert steps[0]["args"] == {"num_rows": 2, "num_tokens": 64}
    assert (steps[0]["ts"], steps[0]["dur"]) == (pytest.approx(1e5), pytest.approx(2e5))
    assert [event["args"]["name"] for event in events_of(record, "M") if event["name"] == "process_name"] == [
        "world",
        "engine 0",
        "engine 1",
    ]
    assert events_of(record, "C")[0]["args"] == {"running": 0, "waiting": 0, "loading": 0}
    assert [(event["pid"], event["s"]) for event in events_of(record, "i")] == [(1, "p"), (3, "g")]


@pytest.mark.parametrize(
    ("bound", "phase", "most"),
    [("MAX_STEPS", "X", 20), ("MAX_REQUESTS", "b", 80), ("MAX_SAMPLES", "C", 40), ("MAX_FAULTS", "i", 1)],
)
def test_a_long_run_is_cut_and_says_so(
    monkeypatch: pytest.MonkeyPatch, bound: str, phase: str, most: int
) -> None:
    record = made_up_run()
    assert "cut" not in json.loads(chrome_trace(record))["otherData"]
    num_before = len(events_of(record, phase))
    monkeypatch.setattr(module, bound, 1 if bound == "MAX_FAULTS" else 20)
    assert "only what began in the first" in json.loads(chrome_trace(record))["otherData"]["cut"]
    assert 0 < len(events_of(record, phase)) <= most < num_before
