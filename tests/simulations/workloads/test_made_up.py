"""Generators: the seed decides, the figures are those asked for, and answers lead to what follows."""

from __future__ import annotations

import random
import statistics
from itertools import islice, pairwise
from pathlib import Path

import msgspec
import pytest

from ksana.errors import ConfigError
from simulations.requests import Ending, ListedText, NamedText, SimRequest, Workload
from simulations.workloads.lengths import parse_lengths
from simulations.workloads.made_up import Texts, arrival_gaps
from simulations.workloads.spec import (
    ClosedSpec,
    OpenSpec,
    SessionsSpec,
    TraceSpec,
    WorkloadSpec,
    open_workload,
)


def listed(spec: WorkloadSpec, seed: int = 1) -> list[SimRequest]:
    return list(open_workload(spec, seed).first())


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_gaps_have_the_rate_and_the_variation(cv: float) -> None:
    gaps = list(islice(arrival_gaps(random.Random(1), 4.0, cv), 40_000))
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) / mean == pytest.approx(cv, rel=0.1, abs=1e-9)


@pytest.mark.parametrize(
    ("text", "low", "high", "median"),
    [("7", 7, 7, 7), ("uniform:10:30", 10, 30, 20), ("lognormal:100:1.5:400", 1, 400, 100)],
)
def test_lengths(text: str, low: int, high: int, median: float) -> None:
    lengths, rng = parse_lengths(text), random.Random(1)
    drawn = [lengths.draw(rng) for _ in range(5000)]
    assert min(drawn) >= low
    assert max(drawn) == high
    assert statistics.median(drawn) == pytest.approx(median, rel=0.1)


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "-1", "nan", "inf", "uniform:5", "uniform:5:4", "normal:1:2", "lognormal:nan:1:9",
     "lognormal:10:-1:9", "lognormal:10:1:1e300", "9" * 100],
)  # fmt: skip
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="lengths"):
        parse_lengths(text)


def test_the_seed_decides_and_the_rate_changes_only_the_times() -> None:
    spec = OpenSpec(texts=Texts(input_tokens="uniform:5:50", num_prefixes=3), num_requests=50, rate_per_s=2.0)
    assert listed(spec) == listed(spec)
    assert listed(spec) != listed(spec, seed=2)
    faster = listed(msgspec.structs.replace(spec, rate_per_s=4.0))
    for slow, fast in zip(listed(spec), faster, strict=True):
        assert fast == msgspec.structs.replace(slow, arrival_s=fast.arrival_s)
        assert fast.arrival_s == pytest.approx(slow.arrival_s / 2)


def test_prefixes_are_shared_and_the_rest_is_not() -> None:
    spec = OpenSpec(texts=Texts(num_prefixes=3, prefix_tokens="64", input_tokens="8"), num_requests=300)
    prompts = [request.prompt for request in listed(spec)]
    prefixes = [prompt.parts[0] for prompt in prompts]
    by_popularity = [prefixes.count(NamedText(k, 64)) for k in range(3)]
    assert sum(by_popularity) == 300
    assert by_popularity == sorted(by_popularity, reverse=True)
    assert len({prompt.parts[1] for prompt in prompts}) == 300


def answered(request: SimRequest, at_s: float, finished: bool = True) -> Ending:
    return Ending(request=request, at_s=at_s, finished=finished, output_ids=(5, 6))


def test_users_wait_for_their_answers() -> None:
    workload = open_workload(ClosedSpec(num_users=3, num_requests=5, think_s=1.0), seed=1)
    first = list(workload.first())
    assert [request.session for request in first] == [0, 1, 2]
    second = workload.after(answered(first[1], 10.0))
    assert second is not None
    assert second.session == 1
    assert second.arrival_s > 10.0
    assert workload.after(answered(first[0], 11.0, finished=False)) is not None
    assert workload.after(answered(first[2], 11.0)) is None


def test_what_a_user_asks_does_not_depend_on_who_is_answered_first() -> None:
    def lengths(order: tuple[int, ...]) -> dict[int | None, int]:
        spec = ClosedSpec(texts=Texts(input_tokens="uniform:1:1000"), num_users=3, num_requests=6)
        workload = open_workload(spec, seed=1)
        first = list(workload.first())
        following = [workload.after(answered(first[user], 1.0)) for user in order]
        return {request.session: request.prompt.num_tokens for request in following if request is not None}

    assert lengths((0, 1, 2)) == lengths((2, 0, 1))


def converse(workload: Workload, request: SimRequest) -> list[SimRequest]:
    turns = [request]
    while (following := workload.after(answered(turns[-1], turns[-1].arrival_s + 1))) is not None:
        turns.append(following)
    return turns


def test_a_conversation_contains_what_was_said() -> None:
    spec = SessionsSpec(texts=Texts(input_tokens="10"), num_sessions=2, turns="4", think_s=1.0)
    workload = open_workload(spec, seed=1)
    for session, request in enumerate(list(workload.first())):
        turns = converse(workload, request)
        assert len(turns) == 4
        for before, after in pairwise(turns):
            assert after.session == session
            said = before.prompt.parts
            assert after.prompt.parts[: len(said) + 1] == (*said, ListedText((5, 6)))
            assert after.prompt.num_tokens == before.prompt.num_tokens + 12


def test_a_conversation_ends_early() -> None:
    spec = SessionsSpec(texts=Texts(input_tokens="10"), num_sessions=2, turns="9", max_prompt_tokens=34)
    workload = open_workload(spec, seed=1)
    first, second = workload.first()
    assert len(converse(workload, first)) == 3
    assert workload.after(answered(second, 1.0, finished=False)) is None


@pytest.mark.parametrize(
    "text",
    [
        {"type": "open", "rate_per_s": 0},
        {"type": "open", "cv": -1},
        {"type": "open", "num_requests": 0},
        {"type": "open", "texts": {"input_tokens": "many"}},
        {"type": "open", "texts": {"num_prefixes": -1}},
        {"type": "closed", "num_users": 10**9},
        {"type": "closed", "texts": {"timeout_s": 0}},
        {"type": "sessions", "turns": "0"},
        {"type": "trace", "path": "x", "speedup": -2},
        {"type": "trace", "path": "x", "limit": 0},
        {"type": "trace", "path": "x", "more": 1},
        {"type": "listed"},
    ],
)
def test_hostile_specs(text: object) -> None:
    with pytest.raises((ConfigError, msgspec.ValidationError)):
        msgspec.convert(text, WorkloadSpec)


def test_a_trace_is_cut_and_sped_up(tmp_path: Path) -> None:
    path = tmp_path / "workload.jsonl"
    lines = [{"input_toks": 4, "output_toks": 2, "arrival_time_ns": k * 10**9} for k in range(5)]
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    requests = listed(TraceSpec(path=str(path), limit=3, speedup=2.0))
    assert [request.arrival_s for request in requests] == [0.0, 0.5, 1.0]
