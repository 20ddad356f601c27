"""Figures of made-up records, reckoned by hand."""

from __future__ import annotations

from array import array

import msgspec
import pytest

from simulations.reports.metrics import EngineRecord, EngineSample, RequestRecord, RunRecord
from simulations.reports.summary import Target, as_json, summarise


def request(index: int, arrival_s: float, *token_times_s: float, **fields: object) -> RequestRecord:
    """A request that was scheduled 0.1 s after it came, and finished with its last token."""
    times = array("d", token_times_s)
    last_s = times[-1] if times else None
    record = RequestRecord(
        index=index,
        engine="one",
        arrival_s=arrival_s,
        num_prompt_tokens=100,
        scheduled_s=arrival_s + 0.1,
        first_token_s=times[0] if times else None,
        last_token_s=last_s,
        ended_s=last_s if last_s is not None else arrival_s + 1,
        ending="finished length" if times else "failed 504",
        num_output_tokens=len(times),
        token_times_s=times,
    )
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def run(*requests: RequestRecord) -> RunRecord:
    return RunRecord(title="made up", seed=1, settings={}, requests=list(requests), virtual_s=100.0)


def test_times() -> None:
    summary = summarise(run(request(0, 1.0, 1.5, 1.7, 2.1), request(1, 2.0, 4.0)))
    assert summary.ttft_s is not None
    assert (summary.ttft_s.num, summary.ttft_s.max) == (2, 2.0)
    assert summary.ttft_s.mean == pytest.approx(1.25)
    assert summary.ttft_s.p50 == pytest.approx(1.25)
    assert summary.ttft_from_scheduled_s is not None
    assert summary.ttft_from_scheduled_s.mean == pytest.approx(1.15)
    assert summary.queue_s is not None
    assert summary.queue_s.mean == pytest.approx(0.1)
    assert summary.tpot_s is not None  # of the first request alone
    assert (summary.tpot_s.num, summary.tpot_s.mean) == (1, pytest.approx(0.3))
    assert summary.itl_s is not None
    assert (summary.itl_s.num, summary.itl_s.max) == (2, pytest.approx(0.4))
    assert summary.latency_s is not None
    assert summary.latency_s.mean == pytest.approx(1.55)
    assert summary.requests_per_s == pytest.approx(2 / 3)
    assert summary.output_tokens_per_s == pytest.approx(4 / 3)
    assert summary.input_tokens_per_s == pytest.approx(200 / 3)


def test_who_did_not_finish_has_no_times_but_is_counted() -> None:
    left = request(2, 2.0, 2.5, ending="left")
    lost = request(3, 5.0, ending="", ended_s=None)
    summary = summarise(run(request(0, 1.0, 1.5), request(1, 2.0), left, lost))
    assert (summary.num_requests, summary.num_finished) == (4, 1)
    assert summary.endings == {"failed 504": 1, "finished length": 1, "left": 1, "never ended": 1}
    assert summary.ttft_s is not None
    assert summary.ttft_s.num == 1
    assert summary.tpot_s is None
    assert summary.requests_per_s == pytest.approx(1 / 99)  # until the end of the run


def test_goodput_counts_the_refused_and_not_those_who_left() -> None:
    good, slow_start = request(0, 1.0, 1.2, 1.3), request(1, 1.0, 1.6, 1.7)
    slow_tokens, one_token = request(2, 1.0, 1.1, 1.9), request(3, 1.0, 1.4)
    refused, left = request(4, 1.0, ending="refused 429"), request(5, 1.0, ending="left")
    record = run(good, slow_start, slow_tokens, one_token, refused, left)
    goodput = summarise(record, Target(ttft_s=0.5, tpot_s=0.2)).goodput
    assert goodput is not None
    assert goodput.share == pytest.approx(2 / 5)
    assert goodput.requests_per_s == pytest.approx(2 / 1.0)


def test_the_beginning_can_be_left_out() -> None:
    summary = summarise(
        run(request(0, 1.0, 9.0), request(1, 10.0, 10.5), request(2, 11.0, 12.0)), from_s=10.0
    )
    assert summary.num_requests == 2
    assert summary.ttft_s is not None
    assert summary.ttft_s.max == 1.0
    assert summary.requests_per_s == pytest.approx(2 / 2.0)


def test_an_empty_run() -> None:
    summary = summarise(run(), Target(ttft_s=1, tpot_s=1))
    assert summary.ttft_s is None
    assert summary.requests_per_s == 0.0
    assert msgspec.json.decode(as_json(summary))["num_requests"] == 0


def test_engines_are_added_up() -> None:
    record = run()
    for queried, hit in ((100, 50), (300, 0)):
        sample = EngineSample(
            at_s=1.0, num_running=1, num_waiting=0, num_queried_tokens=queried, num_hit_tokens=hit
        )
        counters = {"num_steps": 5, "num_preemptions": 2}
        record.engines.append(EngineRecord(name="x", samples=[sample], counters=counters))
    record.counters = {"num_messages": 7}
    summary = summarise(record)
    assert summary.hit_rate == pytest.approx(50 / 400)
    assert (summary.num_steps, summary.num_preemptions) == (10, 4)
    assert summary.counters == {"num_messages": 7, "num_preemptions": 4, "num_steps": 10}
