from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ksana.costs.cost_file import CostModel, load_cost, save_cost
from ksana.costs.extrapolation import ExtrapolationError
from ksana.costs.fitted_cost import FittedCost, FittedTerms
from ksana.costs.step_cost import StepShape
from ksana.errors import ConfigError
from ksana.perf import fitting
from ksana.perf.fitting import Measurement, cross_validate, fit_profile, fit_result, fit_terms
from ksana.perf.nonnegative_fit import fit_nonnegative
from ksana.perf.result import BatchResult, BatchShape, PerfResult, RequestGroup, RoundSample, write_result
from tests.costs.profiles import attention_us, write_profile
from tests.costs.test_profile_cost import shape

SHAPES = [shape(decodes=num, kv=kv) for num, kv in itertools.product((1, 2, 4, 8, 16, 32), (16, 200, 900))]
SHAPES += [shape((tokens, before)) for tokens, before in itertools.product((16, 64, 256, 500), (0, 100, 500))]
SHAPES += [shape((tokens, 64), decodes=num, kv=100) for tokens, num in ((32, 4), (100, 16), (300, 8))]


def true_seconds(step: StepShape) -> float:
    """Slower from 64 tokens on, as where a product no longer waits for memory."""
    return (
        0.004
        + 2e-5 * step.num_tokens
        + 8e-5 * max(0, step.num_tokens - 64)
        + 3e-4 * step.num_samples
        + 2e-8 * step.prefill_pairs
        + 4e-7 * step.decode_kv
    )


def measurements(noise: float = 0.0) -> list[Measurement]:
    rng = random.Random(1)
    return [
        Measurement(shape=step, seconds=true_seconds(step) * (1 + noise * rng.gauss(0, 1))) for step in SHAPES
    ]


def test_nonnegative_least_squares() -> None:
    rng = np.random.default_rng(3)
    features = rng.random((40, 5)) * [1, 10, 1e3, 1e6, 1e-3]
    for true in ([1, 2, 3e-3, 4e-6, 5e3], [0, 2, 0, 1e-6, 7e2], [0, 0, 0, 0, 0]):
        found = fit_nonnegative(features, features @ np.array(true, dtype=float))
        assert found == pytest.approx(true, rel=1e-6, abs=1e-9)


def test_what_wants_to_be_negative_is_zero_and_the_rest_is_best() -> None:
    rng = np.random.default_rng(4)
    features = rng.random((60, 4))
    target = features @ np.array([1.0, -0.5, 2.0, 0.3]) + 0.1 * rng.random(60)
    found = fit_nonnegative(features, target)
    assert (found >= 0).all()
    gradient = features.T @ (target - features @ found)
    # The conditions of an optimum: no slope along what is free, none that helps along what is fixed at 0.
    assert gradient[found > 0] == pytest.approx(0, abs=1e-9)
    assert (gradient[found == 0] <= 1e-9).all()
    assert found[1] == 0


def test_the_fit_of_made_up_times_recovers_them() -> None:
    fitted = fit_terms(measurements())
    assert fitted.constant_s == pytest.approx(0.004, rel=0.02)
    per_unit = {(term.quantity, term.form, term.knot): term.seconds for term in fitted.terms}
    assert per_unit["samples", "all", 0] == pytest.approx(3e-4, rel=0.02)
    assert per_unit["tokens", "all", 0] == pytest.approx(2e-5, rel=0.2)
    assert per_unit["tokens", "over", 64] == pytest.approx(8e-5, rel=0.02)
    assert per_unit["decode_kv", "all", 0] == pytest.approx(4e-7, rel=0.02)
    assert per_unit["prefill_pairs", "all", 0] == pytest.approx(2e-8, rel=0.02)
    assert fitted.most["tokens"] == 500


def test_noise_is_reported_and_no_more_than_that() -> None:
    exact, noisy = cross_validate(measurements()), cross_validate(measurements(noise=0.03))
    assert exact.num_samples == noisy.num_samples == len(SHAPES)
    assert exact.max_abs_pct < 1
    assert 1 < noisy.mean_abs_pct < 6
    assert noisy.max_abs_pct > noisy.mean_abs_pct


def lean(noise: float, *, slow: float = 0.0) -> float:
    """By how much the logarithm of predicted over true is off, on average over steps and draws. Times scatter
    by `noise`, and a share of them took twice as long, as where something else ran."""
    off = []
    for seed in range(12):
        rng = random.Random(seed)
        measured = [
            Measurement(
                shape=step,
                seconds=true_seconds(step) * math.exp(rng.gauss(0, noise)) * (1 + (rng.random() < slow)),
            )
            for step in SHAPES
        ]
        cost = FittedCost(fit_terms(measured))
        off += [math.log(cost.seconds(step) / true_seconds(step)) for step in SHAPES]
    return sum(off) / len(off)


def test_a_fit_to_noise_leans_to_neither_side() -> None:
    assert abs(lean(0.03)) < 0.005
    assert abs(lean(0.2)) < 0.03
    assert 0 < lean(0.03, slow=0.1) < 0.025


def test_a_fit_to_many_sizes_tries_a_bounded_number_of_knots(monkeypatch: pytest.MonkeyPatch) -> None:
    num_solved = 0
    solve = fitting._solve

    def counted(*arguments: Any) -> Any:
        nonlocal num_solved
        num_solved += 1
        return solve(*arguments)

    monkeypatch.setattr(fitting, "_solve", counted)
    steps = [shape((tokens, 0)) for tokens in range(2, 400)]
    fitted = fit_terms([Measurement(shape=step, seconds=true_seconds(step)) for step in steps])
    assert num_solved <= 1 + 4 * 2 * 64
    knots = [term.knot for term in fitted.terms if term.form != "all"]
    assert min(abs(knot - 64) for knot in knots) <= 7  # as near as those that are tried come


def batch(step: StepShape, index: int, *, factor: int = 1, error: str | None = None) -> BatchResult:
    groups = [
        RequestGroup(sequence_len=before + tokens, forwarding_token_num=tokens, request_num=1)
        for tokens, before in step.prefills
    ]
    if step.num_decodes:
        kv = step.decode_kv // step.num_decodes
        groups.append(RequestGroup(sequence_len=kv + 1, forwarding_token_num=1, request_num=step.num_decodes))
    worker_ns = round(true_seconds(step) * 1e9)
    rounds = [
        RoundSample(
            schedule_ns=100_000,
            dispatch_ns=200_000,
            prepare_ns=1_000_000,
            forward_ns=(worker_ns - 3_000_000) * (1 if index else 9),
            sampling_ns=2_000_000,
            update_ns=50_000,
            step_ns=worker_ns + 350_000,
        )
        for index in range(5)  # the first round is disturbed
    ]
    return BatchResult(
        name=f"batch {index}",
        shape=BatchShape(
            requests=tuple(groups),
            num_requests=step.num_rows,
            num_prefills=len(step.prefills),
            num_decodes=step.num_decodes,
            num_forwarding_tokens=step.num_tokens,
            num_kv_tokens=step.decode_kv + sum(before for _, before in step.prefills),
        ),
        warmup_rounds=0,
        stat_rounds=len(rounds),
        layer_forward_round=factor,
        rounds=() if error else tuple(rounds),
        error=error,
    )


def result(batches: list[BatchResult], *, plan_ahead: bool = False) -> PerfResult:
    return PerfResult(
        model="made up",
        model_fingerprint="0" * 64,
        device="cpu",
        dtype="float32",
        parallel_sizes={},
        block_size=16,
        versions={},
        plan_ahead=plan_ahead,
        seed=1,
        max_num_batched_tokens=512,
        max_num_seqs=64,
        max_model_len=2048,
        batches=tuple(batches),
    )


def test_a_result_becomes_a_cost_model(tmp_path: Path) -> None:
    odd = [batch(SHAPES[0], 98, error="it broke"), batch(SHAPES[0], 99, factor=4)]
    batches = [batch(step, index) for index, step in enumerate(SHAPES)]
    write_result(tmp_path / "result.json", result([*odd, *batches]))
    model = fit_result(tmp_path / "result.json")
    assert model.host_s == pytest.approx(350e-6)
    assert model.errors["held-out steps"].num_samples == len(SHAPES)
    assert model.errors["held-out steps"].max_abs_pct < 1
    for step in (shape(decodes=5, kv=333), shape((77, 41)), shape((77, 41), decodes=11, kv=100)):
        assert model.step.seconds(step) == pytest.approx(true_seconds(step), rel=0.02)
    with pytest.raises(ExtrapolationError):
        model.step.seconds(shape((501, 0)))
    save_cost(tmp_path / "cost.json", model)
    again = load_cost(tmp_path / "cost.json", allow_extrapolation=True)
    assert isinstance(again.data, FittedTerms)
    assert again.step.seconds(shape((501, 0))) == pytest.approx(true_seconds(shape((501, 0))), rel=0.02)
    assert again.num_extrapolated == 1


def test_planned_ahead_the_host_takes_no_time(tmp_path: Path) -> None:
    batches = [batch(step, index) for index, step in enumerate(SHAPES)]
    write_result(tmp_path / "result.json", result(batches, plan_ahead=True))
    assert fit_result(tmp_path / "result.json").host_s == 0


def test_too_few_batches_are_refused(tmp_path: Path) -> None:
    write_result(tmp_path / "result.json", result([batch(step, 1) for step in SHAPES[:7]]))
    with pytest.raises(ConfigError, match="7 batches that tell what a step takes"):
        fit_result(tmp_path / "result.json")


def test_a_step_that_took_no_time_is_refused(tmp_path: Path) -> None:
    none = RoundSample(**dict.fromkeys(RoundSample.__struct_fields__, 0))
    batches = [batch(step, index) for index, step in enumerate(SHAPES)]
    batches[3] = msgspec.structs.replace(batches[3], rounds=(none,))
    write_result(tmp_path / "r.json", result(batches))
    with pytest.raises(ConfigError, match="a step that took no time"):
        fit_result(tmp_path / "r.json")


def test_a_profile_becomes_a_cost_model_with_its_errors(tmp_path: Path) -> None:
    write_profile(tmp_path)
    (tmp_path / "skew.csv").write_text(
        "n,nb,pc,kp,kvs,kv_big,t_mean_us,t_skew_us\n4,1,0,0,64,256,100,125\n2,1,64,128,64,256,300,270\n"
    )
    model = fit_profile(tmp_path, num_layers=4)
    assert isinstance(model, CostModel)
    for kind in ("each number of decodes", "each KV length"):
        held_out = model.errors[f"attention, {kind} from its neighbours"]
        assert held_out.num_samples >= 8
        assert held_out.max_abs_pct < 1e-6  # the made-up times are as the interpolation says
    assert model.errors["attention, decodes of unequal KV lengths"].num_samples == 1
    assert model.errors["attention, the same beside a prefill"].num_samples == 1


RATES = {(4, 1): 0.04, (4, 2): 0.02, (8, 1): 0.06, (8, 4): 0.01}
"""Microseconds per token that one or more of n decodes are longer than the rest."""


def write_skew(directory: Path, *, times: float) -> None:
    """As measured `times` times and added up, alone and (with half the rates) beside a prefill."""
    lines = []
    for ((num, longer), rate), kv, tokens in itertools.product(RATES.items(), (64, 128, 256), (0, 64)):
        mean = (longer * 4 * kv + (num - longer) * kv) / num
        equal = attention_us(tokens, 0, num, mean)
        skewed = equal + rate / (2 if tokens else 1) * 3 * kv
        lines.append(f"{num},{longer},{tokens},0,{kv},{4 * kv},{times * equal},{times * skewed}")
    text = "\n".join(["n,nb,pc,kp,kvs,kv_big,t_mean_us,t_skew_us", *lines])
    (directory / "skew.csv").write_text(text)


def test_unequal_lengths_cost_what_was_measured(tmp_path: Path) -> None:
    write_profile(tmp_path)
    plain = fit_profile(tmp_path, num_layers=4)
    assert "attention, decodes of unequal KV lengths" not in plain.errors
    write_skew(tmp_path, times=3)
    model = fit_profile(tmp_path, num_layers=4)
    for kind in ("attention, decodes of unequal KV lengths", "attention, the same beside a prefill"):
        assert model.errors[kind].max_abs_pct < 1
    assert fit_profile(tmp_path, num_layers=4, unequal_kv=True).data == model.data

    def extra_us(*lengths: int, prefills: tuple[tuple[int, int], ...] = ()) -> float:
        step = shape(*prefills, decodes=len(lengths), kv=0)
        kv = sum(lengths)
        step = msgspec.structs.replace(step, decode_kv=kv, max_decode_kv=max(lengths), decode_lengths=lengths)
        return (model.step.seconds(step) - plain.step.seconds(step)) * 1e6 / 4

    assert extra_us(100, 100, 100, 100) == pytest.approx(0, abs=1e-9)
    assert extra_us(100, 400, 100, 100) == pytest.approx(0.04 * 300)
    # Two are longer than the rest by 300, and one of them by 100 more.
    assert extra_us(400, 100, 500, 100) == pytest.approx(0.02 * 300 + 0.04 * 100)
    # Six decodes lie in the middle between four and eight.
    assert extra_us(100, 400, 100, 100, 100, 100) == pytest.approx(0.05 * 300)
    assert extra_us(100, 400, 100, 100, prefills=((64, 0),)) == pytest.approx(0.02 * 300)
    save_cost(tmp_path / "cost.json", model)
    assert load_cost(tmp_path / "cost.json").data == model.data


def test_unequal_lengths_need_a_file_that_has_them(tmp_path: Path) -> None:
    write_profile(tmp_path)
    with pytest.raises(ConfigError, match=r"skew.csv"):
        fit_profile(tmp_path, num_layers=4, unequal_kv=True)
    (tmp_path / "skew.csv").write_text("n,nb,pc,kp,kvs,kv_big,t_mean_us,t_skew_us\n4,0,0,0,64,64,9,9\n")
    with pytest.raises(ConfigError, match="no batch of decodes of unequal KV lengths"):
        fit_profile(tmp_path, num_layers=4, unequal_kv=True)
