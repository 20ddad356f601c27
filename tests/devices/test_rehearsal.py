"""Steps of the performance backend in the worker, on tiny random models."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
import torch

from ksana.devices.rehearsal import repeated_layers
from ksana.devices.runner import ModelRunner
from ksana.errors import InvariantViolated
from ksana.messages.steps import Rehearsal, StepPlan
from ksana.models.batch import KvCache
from ksana.models.decoder import Model
from ksana.models.loader import load_model
from tests.models_for_tests import tiny_gemma3_dir, tiny_llama_dir

from .plans import edits, new_row, plan, row

BLOCK = 16


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    make = tiny_llama_dir if request.param == "llama" else tiny_gemma3_dir
    path: Path = make(tmp_path_factory.mktemp(request.param))
    return load_model(path, lambda _done, _total: None, 128)


class Worker:
    """A runner with one request of 40 tokens, of which 32 are filled in and a round computes 8."""

    def __init__(self, model: Model, fill_seed: int = 5) -> None:
        num_swa = 8 if model.spec.num_sliding_layers else 0
        self.kv = KvCache.allocate(model.spec, 8, num_swa, BLOCK)
        self.runner = ModelRunner(model, self.kv, num_fa_blocks=8, num_swa_blocks=num_swa, max_model_len=128)
        tables = {"fa": edits(3, 1, 4), "swa": edits(2, 0, 5) if num_swa else ()}
        first = plan(
            1,
            row(1, 0, 32, sample=False, **tables),
            new=(new_row(1, tuple(range(10, 50))),),
        )
        self.filled = self.run(first, Rehearsal(fill_seed=fill_seed))

    def run(self, one: StepPlan, rehearsal: Rehearsal | None = None):  # type: ignore[no-untyped-def]
        return self.runner.run(msgspec.structs.replace(one, rehearsal=rehearsal))

    def round(self, step_id: int, **changes: object):  # type: ignore[no-untyped-def]
        return self.run(plan(step_id, row(1, 32, 8)), Rehearsal(**changes))  # type: ignore[arg-type]


def test_a_dry_step_fills_kv_and_computes_nothing(model: Model) -> None:
    worker = Worker(model)
    assert worker.filled.results[0].token_ids == ()
    assert worker.filled.times.forward_ns == worker.filled.times.sample_ns == 0
    for layer, kind in enumerate(model.spec.layer_kinds):
        blocks = [3, 1] if kind == "full" else [2, 0]
        for cache in (worker.kv.keys[layer], worker.kv.values[layer]):
            filled = cache[blocks]
            assert (filled != 0).all()
            assert 0.5 < float(filled.std()) < 1.5
            assert (cache[6:] == 0).all()
    assert torch.equal(Worker(model).kv.keys[0], worker.kv.keys[0])
    assert not torch.equal(Worker(model, fill_seed=6).kv.keys[0], worker.kv.keys[0])
    assert not torch.equal(worker.kv.keys[0], worker.kv.values[0])


def test_a_round_can_be_run_again_and_gives_the_same(model: Model) -> None:
    worker = Worker(model)
    done = [worker.round(step_id) for step_id in (2, 3, 4)]
    assert all(len(one.results[0].token_ids) == 1 for one in done)
    assert done[0].results == done[1].results == done[2].results
    assert all(one.times.forward_ns > 0 and one.operators == () for one in done)
    # What a round would have kept if it were a step like any other.
    kept = worker.run(plan(5, row(1, 32, 8)))
    assert kept.results == done[0].results
    with pytest.raises(InvariantViolated, match="samples elsewhere"):
        worker.round(6)


def test_operators_are_timed_in_a_round_that_asks_for_it(model: Model) -> None:
    worker = Worker(model)
    worker.round(2)
    plain = worker.round(3)
    traced = worker.round(4, trace_operators=True)
    assert sys.getprofile() is None
    assert traced.results == plain.results
    calls = {operator.name: operator.num_calls for operator in traced.operators}
    spec, layers = model.spec, model.spec.num_layers
    assert calls["rope"] == calls["write_kv"] == layers
    assert calls["sample"] == 1
    if spec.num_sliding_layers:
        assert calls[f"paged_attention (window {spec.sliding_window})"] == spec.num_sliding_layers
        assert calls["paged_attention"] == layers - spec.num_sliding_layers
        assert calls["gelu_tanh_mul"] == layers
    else:
        assert calls["paged_attention"] == calls["silu_mul"] == layers
    assert f"linear {spec.hidden_size}->{spec.vocab_size}" in calls
    assert num_linears(calls) == 4 * layers + 1
    total_ns = sum(operator.total_ns for operator in traced.operators)
    times = traced.times
    assert 0 < total_ns <= times.prepare_ns + times.forward_ns + times.sample_ns
    assert list(traced.operators) == sorted(traced.operators, key=lambda operator: -operator.total_ns)


def num_linears(calls: dict[str, int]) -> int:
    return sum(count for name, count in calls.items() if name.startswith("linear"))


def test_layers_run_as_often_as_asked(model: Model) -> None:
    worker = Worker(model)
    num_layers = len(model.layers)
    traced = worker.round(2, trace_operators=True, num_layer_rounds=3)
    calls = {operator.name: operator.num_calls for operator in traced.operators}
    assert calls["rope"] == 3 * num_layers
    assert num_linears(calls) == 3 * 4 * num_layers + 1
    assert len(model.layers) == num_layers
    assert worker.round(3).results == Worker(model).round(2).results


def test_layers_are_whole_again_after_an_error(model: Model) -> None:
    worker = Worker(model)
    num_layers = len(model.layers)
    with pytest.raises(InvariantViolated, match="no fa block"):
        worker.run(plan(2, row(1, 32, 8, fa=edits(-1, first=2))), Rehearsal(num_layer_rounds=2))
    assert len(model.layers) == num_layers
    with repeated_layers(model, 2):
        assert len(model.layers) == 2 * num_layers


def test_a_model_without_layers_cannot_repeat_them() -> None:
    with pytest.raises(InvariantViolated, match="cannot be repeated"), repeated_layers(object(), 2):
        pass
