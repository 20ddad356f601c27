"""A recorded run once more: the same when nothing is changed, and otherwise as the change would have it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ksana.cli.main import main
from ksana.costs.step_cost import StepShape
from ksana.errors import ConfigError
from ksana.journal.reading import JournalError, Segment, list_segments
from ksana.journal.requests import RecordedRequest, requests_of
from ksana.what_if.changes import NAMES, changed, without_remote_cache
from ksana.what_if.figures import Figures, recorded_figures
from ksana.what_if.rerun import rerun
from ksana.what_if.step_times import FittedStepCost, RecordedStep, fit, recorded_steps
from tests.journal.recording import record

COST = FittedStepCost(
    fixed_s=0.005,
    per_decode_s=1e-4,
    per_prefill_token_s=2e-4,
    per_decode_kv_s=1e-7,
    per_prefill_pair_s=1e-8,
)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[Segment]:
    directory = tmp_path_factory.mktemp("calm")
    record(directory, seed=4, num_requests=150, is_calm=True)
    return list_segments(directory)


def mean_ttft(figures: Figures) -> float:
    timings = [ended.timing for ended in figures.ended]
    waits = [t.first_token_s - t.arrival_s for t in timings if t is not None and t.first_token_s is not None]
    return sum(waits) / len(waits)


def shape(num_decodes: int, prefills: tuple[tuple[int, int], ...], decode_kv: int) -> StepShape:
    return StepShape(
        num_tokens=num_decodes + sum(tokens for tokens, _ in prefills),
        num_rows=num_decodes + len(prefills),
        num_samples=num_decodes,
        prefills=prefills,
        num_decodes=num_decodes,
        decode_kv=decode_kv,
    )


def test_with_the_recorded_settings_it_is_the_recorded_run(calm: list[Segment]) -> None:
    requests = requests_of(calm)
    recorded = recorded_figures(calm, frozenset())
    again = rerun(requests, calm[0].header.settings, fit(recorded_steps(calm)).cost)
    assert len(recorded.ended) > 100
    assert recorded.num_started_again > 0
    assert recorded.num_aborted > 0
    assert len(again.ended) == pytest.approx(len(recorded.ended), abs=3)
    assert again.num_steps == pytest.approx(recorded.num_steps, rel=0.05)
    assert mean_ttft(again) == pytest.approx(mean_ttft(recorded), rel=0.25)
    answers = {ended.request_id: ended for ended in recorded.ended}
    for ended in again.ended:
        if ended.request_id in answers:
            assert ended.outcome == answers[ended.request_id].outcome
            assert ended.usage.num_output_tokens == answers[ended.request_id].usage.num_output_tokens


def test_it_is_the_same_every_time(calm: list[Segment]) -> None:
    requests = requests_of(calm)[:40]
    one, two = (rerun(requests, calm[0].header.settings, COST) for _ in range(2))
    assert one == two


def test_changes_do_what_they_should(calm: list[Segment]) -> None:
    requests, settings = requests_of(calm), calm[0].header.settings
    before = rerun(requests, settings, COST)
    assert before.num_started_again > 0
    roomy = rerun(requests, changed(settings, ["num_fa_blocks=2000", "num-swa-blocks = 2000"]), COST)
    assert roomy.num_started_again == 0
    alone = rerun(requests, changed(settings, ["max_num_seqs=1"]), COST)
    assert mean_ttft(alone) > 2 * mean_ttft(before)
    assert alone.num_steps > before.num_steps


def test_a_request_that_was_left_goes_on_with_made_up_tokens(calm: list[Segment]) -> None:
    request = next(r for r in requests_of(calm) if r.outcome is not None and not r.aborted_s and not r.stop)
    cut: RecordedRequest = msgspec.structs.replace(
        request,
        output_token_ids=request.output_token_ids[:1],
        sampling=msgspec.structs.replace(request.sampling, max_tokens=20, ignore_eos=True),
        deadline_s=1e9,
    )
    figures = rerun([cut], calm[0].header.settings, COST)
    [ended] = figures.ended
    assert ended.usage.num_output_tokens in (1, 20)
    assert rerun([], calm[0].header.settings, COST) == Figures()


def test_the_fit_finds_the_cost_and_tells_its_error() -> None:
    shapes = [
        shape(d, ((p, kv),) if p else (), d * kv)
        for d in (0, 1, 8, 30)
        for p in (0, 16, 100)
        for kv in (0, 50, 900)
    ]
    steps = [RecordedStep(one, COST.seconds(one)) for one in shapes * 3]
    found = fit(steps)
    assert found.typical_error < 0.001
    assert abs(found.mean_error) < 0.001
    for one in shapes:
        assert found.cost.seconds(one) == pytest.approx(COST.seconds(one), rel=0.01)
    odd = [RecordedStep(one, COST.seconds(one) * (3 if at % 2 else 1)) for at, one in enumerate(shapes * 3)]
    assert fit(odd).typical_error > 0.1
    with pytest.raises(JournalError, match="19 steps were recorded"):
        fit(steps[:19])


def test_no_part_of_a_cost_is_negative() -> None:
    """Steps that get shorter with more decodes: nonsense, or caused by something else."""
    steps = [RecordedStep(shape(d, (), 0), 0.05 - d * 0.001) for d in range(1, 30)]
    cost = fit(steps).cost
    assert cost.per_decode_s == 0
    assert cost.seconds(shape(10_000, (), 0)) > 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("max_num_seqs", "say NAME=VALUE"),
        ("max_num_seq=8", "did you mean max_num_seqs?"),
        ("block_size=8", "say NAME=VALUE"),
        ("max_num_seqs=0", "no whole number from 1 to 4096"),
        ("max_num_seqs=-1", "no whole number"),
        ("max_num_seqs=" + "9" * 5000, "no whole number"),
        ("max_num_seqs=0000000000019999", "no whole number"),
        ("num_fa_blocks=99999999", "no whole number from 1 to 4194304"),
        ("plan_ahead=yes", "neither true nor false"),
        ("swa_eviction=best", "none of lfu, lru, lfu-aged"),
    ],
)
def test_changes_that_cannot_be(calm: list[Segment], change: str, text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        changed(calm[0].header.settings, [change])
    assert text in str(raised.value)
    assert len(str(raised.value)) < 500


def test_every_name_is_a_setting_of_scheduler_or_cache(calm: list[Segment]) -> None:
    settings = calm[0].header.settings
    fields = {*settings.scheduler.__struct_fields__, *settings.cache.__struct_fields__}
    assert set(NAMES) <= fields
    assert changed(settings, ["plan_ahead=false"]).cache.plan_ahead is False
    assert changed(settings, ["plan_ahead=false"]).scheduler.plan_ahead is False
    without_window = msgspec.structs.replace(
        settings, cache=msgspec.structs.replace(settings.cache, sliding_window=None)
    )
    with pytest.raises(ConfigError, match="no sliding layers"):
        changed(without_window, ["swa_eviction=lru"])


def test_without_a_remote_cache_nothing_is_loaded(tmp_path: Path) -> None:
    record(tmp_path, seed=1, num_requests=30)
    segments = list_segments(tmp_path)
    settings = without_remote_cache(segments[0].header.settings)
    assert settings.scheduler.max_remote_loads == 0
    assert len(rerun(requests_of(segments), settings, COST).ended) > 20


def test_the_command_lays_the_runs_side_by_side(
    calm: list[Segment], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = str(calm[0].path.parent)
    assert main(["replay", directory, "--set", "max_num_seqs=2", "--set", "plan_ahead=false"]) == 0
    out, err = capsys.readouterr()
    header, *rows = out.splitlines()
    assert header.split() == ["recorded", "run", "again", "max_num_seqs=2,", "plan_ahead=false"]
    names = [row[:30].strip() for row in rows]
    assert {"requests finished", "steps", "requests started again"} <= set(names)
    assert "times fitted to" in err
    assert "24 of 150 requests fail, with the recorded settings 12" in err  # some time out: told, no failure
    assert main(["replay", directory, "--set", "max_num_seqs=2", "--actor", "scheduler"]) == 2
    assert main(["replay", directory, "--set", "nothing"]) == 2


def test_requests_that_ran_before_the_journal_are_left_out_and_told(
    calm: list[Segment], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = str(calm[0].path.parent)
    assert main(["replay", directory, "--segment", "2", "--set", "max_num_seqs=2"]) == 0
    _, err = capsys.readouterr()
    assert "requests that ran when the journal begins are left out" in err


def test_requests_that_ran_when_the_journal_ends_are_told(
    calm: list[Segment], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = calm[0].path.read_bytes()
    (tmp_path / calm[0].path.name).write_bytes(data[: len(data) * 3 // 4])
    num_open = sum(request.outcome is None for request in requests_of(list_segments(tmp_path)))
    assert num_open > 0
    assert main(["replay", str(tmp_path), "--set", "max_num_seqs=2"]) == 0
    assert f"{num_open} requests had not ended when the journal does" in capsys.readouterr().err


def test_settings_with_which_requests_fail_are_told_and_no_success(
    calm: list[Segment], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(calm[0].path.parent), "--set", "num_swa_blocks=1"]) == 1
    out, err = capsys.readouterr()
    assert "requests finished" in out
    assert "with num_swa_blocks=1 " in err
    assert "150 of 150 requests fail, with the recorded settings 12" in err
    assert "is too small" in err


def test_a_cost_that_is_far_off_and_few_requests_are_told(
    calm: list[Segment], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = str(calm[0].path.parent)
    found = fit(recorded_steps(calm))
    off = msgspec.structs.replace(found, mean_error=1.03)
    monkeypatch.setattr("ksana.cli.what_if.fit", lambda _steps: off)
    assert main(["replay", directory, "--set", "max_num_seqs=2"]) == 1
    assert "off by +103.0% on the whole, more than 25%" in capsys.readouterr().err
    monkeypatch.setattr("ksana.cli.what_if.fit", lambda _steps: found)
    few = requests_of(calm)[:2]
    monkeypatch.setattr("ksana.cli.what_if.requests_of", lambda _segments: few)
    assert main(["replay", directory, "--set", "max_num_seqs=2"]) == 1
    assert "2 requests are too few to compare settings by" in capsys.readouterr().err
    late = [
        msgspec.structs.replace(r, added_s=None) if at % 4 else r for at, r in enumerate(requests_of(calm))
    ]
    monkeypatch.setattr("ksana.cli.what_if.requests_of", lambda _segments: late)
    assert main(["replay", directory, "--set", "max_num_seqs=2"]) == 1
    assert "only 38 of 150 requests are compared" in capsys.readouterr().err


def test_skipped_requests_and_steps_of_them_alone_do_not_count(calm: list[Segment]) -> None:
    all_of_them = frozenset(request.request_id for request in requests_of(calm))
    figures = recorded_figures(calm, all_of_them)
    assert (figures.num_steps, figures.num_started_again, figures.ended) == (0, 0, [])
    assert recorded_figures(calm, frozenset()).num_steps > 100
