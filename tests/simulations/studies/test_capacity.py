"""The capacity search: where a border is known, it finds it; and its answers say what they rest on."""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana.costs.step_cost import LinearStepCost
from ksana.errors import ConfigError
from simulations.engine import EngineSpec
from simulations.reports.capacity_report import answer_text
from simulations.reports.summary import Target
from simulations.scenario import WorldSpec
from simulations.studies.capacity import add_capacity_command, find_capacity
from simulations.studies.probes import Probe, Question, at_rate, probe
from simulations.studies.rate_search import search_rate
from simulations.workloads.made_up import Texts
from simulations.workloads.spec import OpenSpec, TraceSpec, open_workload

# One token of prompt and one of answer, one request at a time, and each takes a tenth of a second.
ONE_AT_A_TIME = WorldSpec(
    engines=(EngineSpec(max_num_seqs=1, start_time_s=0.5),),
    cost=LinearStepCost(fixed_s=0.1, per_token_s=0.0, per_attended_token_s=0.0),
)
EVENLY = OpenSpec(texts=Texts(input_tokens="4", output_tokens="1"), num_requests=60, cv=0.0)


def question(ttft_s: float = 0.25, **fields: object) -> Question:
    base = Question(world=ONE_AT_A_TIME, workload=EVENLY, target=Target(ttft_s=ttft_s, tpot_s=1.0))
    return msgspec.structs.replace(base, **fields)


@given(border=st.floats(1e-6, 1e6), start=st.floats(1e-3, 1e3), factor=st.floats(1.05, 10.0))
def test_a_border_is_found_from_anywhere(border: float, start: float, factor: float) -> None:
    trials = []

    def does_hold(rate: float) -> bool:
        trials.append(rate)
        return rate <= border

    bracket = search_rate(does_hold, start, first_factor=factor, tolerance=0.01)
    assert bracket.holds is not None
    assert bracket.breaks is not None
    assert bracket.holds <= border < bracket.breaks <= bracket.holds * 1.0101
    assert len(trials) < 80


def test_a_border_that_is_not_there() -> None:
    nowhere = search_rate(lambda _: False, 1.0)
    assert nowhere.holds is None
    everywhere = search_rate(lambda _: True, 1.0)
    assert everywhere.breaks is None
    with pytest.raises(ConfigError, match="cannot search"):
        search_rate(lambda _: True, 1.0, first_factor=1.0)
    with pytest.raises(ConfigError, match="cannot search"):
        search_rate(lambda _: True, 1.0, tolerance=0.0)


def test_a_server_of_ten_per_second_has_room_for_ten_per_second() -> None:
    trials: list[float] = []
    found = find_capacity(question(), seeds=(0, 1), told=lambda one: trials.append(one.rate_per_s))
    assert found.rate_per_s == pytest.approx(10.0, rel=0.06)
    assert len(trials) == 3 + len(found.probes)  # alone, flooded, and the answer for longer
    assert found.limited_by == ("TTFT",)
    low, high = found.range_per_s
    assert low <= found.rate_per_s <= high
    assert "2 seeds" in answer_text(found)
    assert "TTFT 250 ms and TPOT 1000 ms for 99 % of requests" in answer_text(found)


def test_two_servers_have_twice_the_room() -> None:
    trials: list[Probe] = []
    world = msgspec.structs.replace(ONE_AT_A_TIME, replicas=2)
    found = find_capacity(question(world=world), seeds=(0,), told=trials.append)
    assert found.rate_per_s == pytest.approx(20.0, rel=0.06)


def test_processes_find_what_one_would() -> None:
    trials: list[Probe] = []
    found = [find_capacity(question(), seeds=(0, 1, 2), jobs=jobs, told=trials.append) for jobs in (1, 2)]
    assert found[0].brackets == found[1].brackets
    assert len(trials) % 2 == 0
    rates = [one.rate_per_s for one in trials]
    assert rates[: len(rates) // 2] == rates[len(rates) // 2 :]


def test_an_answer_that_does_not_last_says_so() -> None:
    poisson = OpenSpec(texts=EVENLY.texts, num_requests=40)
    found = find_capacity(question(ttft_s=2.0, workload=poisson), seeds=(0,), told=lambda _: None)
    assert found.rate_per_s is not None
    assert found.rate_per_s > 10.0  # more than it can do: forty are over before the queue is long
    assert found.longer is not None
    assert found.longer.broken == ("TTFT",)
    assert "a little less is what lasts" in answer_text(found)


def test_what_cannot_be_had_even_alone_is_said_at_once() -> None:
    trials: list[Probe] = []
    found = find_capacity(question(ttft_s=0.05), seeds=(0, 1, 2), told=trials.append)
    assert found.rate_per_s is None
    assert found.probes == ()
    assert "do not get it even alone: TTFT too high." in answer_text(found)


def test_requests_that_cannot_be_served_at_all_are_named() -> None:
    work = msgspec.structs.replace(EVENLY, texts=Texts(input_tokens="9000", output_tokens="1"))
    found = find_capacity(question(workload=work), seeds=(0,), told=lambda _: None)
    assert found.rate_per_s is None
    assert answer_text(found).endswith("even alone: failed 400.")


def test_requests_that_are_refused_break_the_target() -> None:
    world = WorldSpec(
        engines=(EngineSpec(max_num_seqs=1, max_queued_requests=2, start_time_s=0.5),),
        cost=ONE_AT_A_TIME.cost,
    )
    flood = probe(question(ttft_s=100.0, world=world), 30.0, seed=0)
    assert flood.num_judged == 48  # of 60, without a tenth at either end
    assert flood.num_failed > 20
    assert flood.broken == ("failures",)
    assert not probe(question(ttft_s=100.0, world=world), 9.0, seed=0).broken


def test_a_rate_changes_nothing_but_the_times(tmp_path: Path) -> None:
    lines = [{"input_toks": 4, "output_toks": 2, "arrival_time_ns": k * k * 10**9} for k in range(5)]
    path = tmp_path / "workload.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    poisson = OpenSpec(texts=Texts(input_tokens="uniform:1:99"), num_requests=50, rate_per_s=3.0)
    for spec in (poisson, TraceSpec(path=str(path), speedup=3.0)):
        before = list(open_workload(spec, 5).first())
        after = list(open_workload(at_rate(spec, 8.0, 5), 5).first())
        assert (after[-1].arrival_s - after[0].arrival_s) * 8.0 == pytest.approx(len(after) - 1)
        assert [r.prompt for r in before] == [r.prompt for r in after]
        factor = after[-1].arrival_s / before[-1].arrival_s
        for (a, b), (c, d) in zip(pairwise(before), pairwise(after), strict=True):
            assert d.arrival_s - c.arrival_s == pytest.approx(factor * (b.arrival_s - a.arrival_s))


def test_one_request_has_no_rate() -> None:
    with pytest.raises(ConfigError, match="two times"):
        at_rate(msgspec.structs.replace(EVENLY, num_requests=1), 1.0, 0)


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_capacity_command(parser.add_subparsers(required=True))
    options = parser.parse_args(["capacity", "--ttft-ms", "250", "--tpot-ms", "1000", *arguments])
    code: int = options.run(options)
    return code


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost = '{"type": "linear", "fixed_s": 0.1, "per_token_s": 0, "per_attended_token_s": 0}'
    sets = ("--set", "max_num_seqs=1", "--set", f"cost={cost}")
    work = ("--requests", "60", "--cv", "0", "--input-tokens", "4", "--output-tokens", "1")
    assert run(*sets, *work, "--seeds", "1", "--report", str(tmp_path)) == 0
    *trials, answer = capsys.readouterr().out.splitlines()
    assert "one by one" in trials[1]
    assert "all at once" in trials[2]
    assert "requests/s keep TTFT 250 ms" in answer
    written = json.loads((tmp_path / "capacity.json").read_text())
    assert f"{written['rate_per_s']:.3g} requests/s" in answer
    assert answer in (tmp_path / "capacity.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--users", "3"), "rate of arrivals"),
        (("--percentile", "101"), "--percentile"),
        (("--ttft-ms", "nan"), "must be positive"),
        (("--seeds", "0"), "--seeds"),
        (("--set", "speed=3"), "no setting 'speed'"),
    ],
)
def test_wrong_questions(arguments: tuple[str, ...], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        run(*arguments)
