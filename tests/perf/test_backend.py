"""ModelPerfBackend on whole engines: tiny models that compute, and a device that fails on demand."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from ksana.config import Settings
from ksana.devices.backend import Answer, Backend, Order
from ksana.devices.build import build_runner
from ksana.devices.inline import InlineBackend
from ksana.devices.simulated import Fault, SimulatedBackend, StartFault
from ksana.devices.simulated_worker import SimulatedWorker, TokenSource, hashed_tokens
from ksana.engine import MakeBackend
from ksana.messages.steps import StepDone, StepPlan
from ksana.model_setup import ModelFiles, ModelSetup
from ksana.perf.batch_run import BatchRun, Rounds
from ksana.perf.batches import Batch
from ksana.perf.limits import check_batches
from ksana.perf.measure import fixed_settings, limits_of, measure
from ksana.perf.result import FIELDS, BatchResult, PerfResult, RequestGroup, RoundSample
from ksana.perf.rounds import MeasuredRound
from tests.engines import COST, model_files
from tests.models_for_tests import tiny_gemma3_dir, tiny_llama_dir

ROUNDS = Rounds(warmup=2, stat=4, operator=2)


def batch(name: str, *entries: tuple[int, int, int], layer_rounds: int = 1) -> Batch:
    groups = tuple(
        RequestGroup(sequence_len=length, forwarding_token_num=computed, request_num=num)
        for length, computed, num in entries
    )
    return Batch(name=name, place=(f"batch {name!r}",), groups=groups, layer_forward_round=layer_rounds)


BATCHES = [
    batch("decodes", (100, 1, 6)),
    batch("both", (130, 30, 1), (47, 1, 3)),
    batch("prefill", (40, 40, 1)),
    batch("layers", (40, 40, 1), layer_rounds=3),
]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    make = tiny_llama_dir if request.param == "llama" else tiny_gemma3_dir
    return model_files(make(tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return model_files(tiny_llama_dir(tmp_path_factory.mktemp("llama")))


def settings_for(files: ModelFiles, **changes: Any) -> Settings:
    defaults: dict[str, Any] = {
        "model": str(files.path),
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
        "kv_cache_memory": "2MiB",
        "plan_ahead": False,
        "num_threads": 1,
    }
    return fixed_settings(Settings(**(defaults | changes)))


class Recorder:
    """A backend that remembers what went through it."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.plans: list[StepPlan] = []
        self.answers: list[StepDone] = []
        self.start, self.stop = inner.start, inner.stop

    async def submit(self, order: Order) -> None:
        assert isinstance(order, StepPlan)
        self.plans.append(order)
        await self._inner.submit(order)

    async def receive(self) -> Answer:
        answer = await self._inner.receive()
        assert isinstance(answer, StepDone)
        self.answers.append(answer)
        return answer


def inline(made: list[Recorder]) -> MakeBackend:
    def make(setup: ModelSetup) -> Backend:
        settings = setup.worker_settings()
        made.append(Recorder(InlineBackend(lambda: build_runner(settings, "", lambda _done, _total: None))))
        return made[-1]

    return make


def simulated(
    *, tokens: TokenSource | None = None, fault: Fault | None = None, start_fault: StartFault | None = None
) -> MakeBackend:
    def make(setup: ModelSetup) -> Backend:
        config = setup.cache_config()
        return SimulatedBackend(
            lambda: SimulatedWorker.of_cache(config, tokens or hashed_tokens(320)),
            cost=COST,
            fault=fault,
            start_fault=start_fault,
        )

    return make


def run(
    files: ModelFiles,
    backend: MakeBackend,
    batches: Sequence[Batch] = BATCHES,
    *,
    rounds: Rounds = ROUNDS,
    virtual: bool = False,
    seed: int = 42,
    on_round: Any = None,
    time_limit_s: float | None = None,
    num_passes: int = 1,
    signals: Sequence[signal.Signals] = (),
    **changes: Any,
) -> PerfResult:
    settings = settings_for(files, **changes)
    check_batches(Path("test"), batches, limits_of(settings, files))

    async def main() -> PerfResult:
        with trio.fail_after(60):
            return await measure(
                settings,
                files,
                batches,
                rounds=rounds,
                seed=seed,
                backend=backend,
                on_round=on_round,
                time_limit_s=time_limit_s,
                num_passes=num_passes,
                signals=signals,
            )

    return trio.run(main, clock=MockClock(autojump_threshold=0) if virtual else None)


def rounds_of(plans: Sequence[StepPlan]) -> list[list[StepPlan]]:
    """The plans that compute, by batch: what a dry step stands before."""
    found: list[list[StepPlan]] = []
    was_dry = True
    for plan in plans:
        assert plan.rehearsal is not None
        is_dry = plan.rehearsal.fill_seed is not None
        if not is_dry:
            if was_dry:
                found.append([])
            found[-1].append(plan)
        was_dry = is_dry
    return found


@pytest.mark.parametrize("plan_ahead", [False, True])
def test_every_batch_is_measured_as_it_is_described(files: ModelFiles, plan_ahead: bool) -> None:
    made: list[Recorder] = []
    told: list[tuple[int, str, int]] = []
    result = run(files, inline(made), on_round=lambda *what: told.append(what), plan_ahead=plan_ahead)
    assert result.plan_ahead == plan_ahead
    assert result.block_size == 16
    assert result.model_fingerprint == files.fingerprint
    assert result.parallel_sizes == {"data": 1, "pipeline": 1, "tensor": 1}
    assert set(result.versions) == {"python", "ksana", "torch", "numpy"}
    assert "process" not in result.device
    assert result.skipped == ()
    assert [batch.name for batch in result.batches] == [batch.name for batch in BATCHES]
    for one in result.batches:
        check_batch(one, plan_ahead)
    expected = [(n, b.name, k) for n, b in enumerate(BATCHES) for k in range(1, ROUNDS.total + 1)]
    assert told == expected
    check_plans(made[0].plans)


def check_batch(one: BatchResult, plan_ahead: bool) -> None:
    assert one.error is None
    assert (one.warmup_rounds, one.stat_rounds) == (2, 4)
    assert len(one.rounds) == 4
    assert len(one.operator_rounds) == 2
    for sample in one.rounds:
        times = {name: getattr(sample, name) for name in sample.__struct_fields__}
        assert all(ns >= 0 for ns in times.values())
        assert min(sample.forward_ns, sample.sampling_ns, sample.step_ns) > 0
        assert (sample.repeats_ns > 0) == (one.layer_forward_round > 1)
        if not plan_ahead:
            assert sum(times.values()) == 2 * sample.step_ns
    assert set(one.summary) == set(one.rounds[0].__struct_fields__)
    assert one.operator_rounds[0].keys() == one.operator_rounds[1].keys()
    assert {"paged_attention", "sample", "write_kv"} <= set(one.operator_rounds[0])
    calls = one.operator_rounds[0]["rope"].calls
    assert calls == (9 if one.layer_forward_round == 3 else 3) or calls == 2 * (
        9 if one.layer_forward_round == 3 else 3
    )
    assert one.shape.num_fa_blocks == sum(
        group.request_num * (group.sequence_len // 16 + 1) for group in one.shape.requests
    )


def check_plans(plans: Sequence[StepPlan]) -> None:
    """All rounds of a batch are the same step but for its number, and for operators being timed."""
    by_batch = rounds_of(plans)
    assert [len(rounds) for rounds in by_batch] == [ROUNDS.total] * len(BATCHES)
    for rounds, one in zip(by_batch, BATCHES, strict=True):
        stat = rounds[: ROUNDS.warmup + ROUNDS.stat]
        assert len({msgspec.msgpack.encode(msgspec.structs.replace(p, step_id=0)) for p in stat}) == 1
        assert all(plan.rows == rounds[0].rows for plan in rounds)
        assert [p.rehearsal.trace_operators for p in rounds if p.rehearsal] == [False] * 6 + [True] * 2
        rows = [(row.start + row.num_tokens, row.num_tokens) for row in rounds[0].rows]
        assert rows == one.requests
        assert all(row.sample for row in rounds[0].rows)


def test_the_same_seed_gives_the_same_steps_and_the_same_tokens(files: ModelFiles) -> None:
    made: list[Recorder] = []
    for seed in (42, 42, 43):
        run(files, inline(made), seed=seed, rounds=Rounds(warmup=0, stat=2, operator=0))
    said = [
        (msgspec.msgpack.encode(one.plans), msgspec.msgpack.encode([a.results for a in one.answers]))
        for one in made
    ]
    assert said[0] == said[1]
    assert said[0][0] != said[2][0]
    assert said[0][1] != said[2][1]


def test_a_batch_gives_the_same_tokens_in_every_round(files: ModelFiles) -> None:
    made: list[Recorder] = []
    run(files, inline(made), rounds=Rounds(warmup=1, stat=3, operator=1))
    results: dict[int, Any] = {answer.step_id: answer.results for answer in made[0].answers}
    for rounds in rounds_of(made[0].plans):
        assert all(results[plan.step_id] == results[rounds[0].step_id] for plan in rounds)
        assert all(len(result.token_ids) == 1 for result in results[rounds[0].step_id])


def test_layers_that_run_thrice_are_divided(llama: ModelFiles) -> None:
    made: list[Recorder] = []
    result = run(llama, inline(made), rounds=Rounds(warmup=0, stat=3, operator=0))
    thrice = result.batches[3]
    assert thrice.layer_forward_round == 3
    measured = [answer for answer in made[0].answers if answer.results[0].token_ids][-3:]
    assert [s.forward_ns for s in thrice.rounds] == [a.times.forward_ns // 3 for a in measured]
    assert all(sample.step_ns > 3 * sample.forward_ns for sample in thrice.rounds)


@pytest.mark.parametrize("num_layer_rounds", [1, 2, 5])
def test_the_parts_add_up_however_often_layers_run(num_layer_rounds: int) -> None:
    sample = RoundSample(
        schedule_ns=1,
        dispatch_ns=2,
        prepare_ns=3,
        forward_ns=1003,
        sampling_ns=5,
        update_ns=6,
        step_ns=1020,
    )
    batch = msgspec.structs.replace(BATCHES[0], layer_forward_round=num_layer_rounds)
    one = BatchRun(batch, Rounds(warmup=0, stat=1, operator=0), [1])
    measured = MeasuredRound(
        sample=sample, operators=(), num_layer_rounds=num_layer_rounds, trace_operators=False
    )
    one.done.append(measured)
    [found] = one.result().rounds
    assert found.forward_ns == 1003 // num_layer_rounds
    assert sum(getattr(found, name) for name in FIELDS) == 2 * found.step_ns == 2040


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_the_batches_that_are_complete(files: ModelFiles, number: signal.Signals) -> None:
    def on_round(num_done: int, _name: str, num_rounds: int) -> None:
        if (num_done, num_rounds) == (2, 1):
            os.kill(os.getpid(), number)

    rounds = Rounds(warmup=0, stat=50, operator=0)
    result = run(files, simulated(), on_round=on_round, rounds=rounds, signals=(number,))
    assert result.interrupted == number.name
    assert [one.name for one in result.batches] == [one.name for one in BATCHES[:2]]
    assert result.skipped == tuple(one.name for one in BATCHES[2:])
    assert all(len(one.rounds) == 50 for one in result.batches)


def test_simulated_time_is_what_the_cost_says(files: ModelFiles) -> None:
    result = run(files, simulated(), virtual=True, rounds=Rounds(warmup=0, stat=2, operator=0))
    forward_ns = [batch.summary["forward_ns"].mean for batch in result.batches]
    tokens = [6, 33, 40, 40]
    assert forward_ns[:3] == [1e9 * (COST.fixed_s + n * COST.per_token_s) for n in tokens[:3]]


def test_a_batch_that_takes_long_runs_fewer_rounds(files: ModelFiles) -> None:
    """A round of the decodes takes 0.0106 s, one of both kinds 0.0133 s."""
    rounds = Rounds(warmup=1, stat=6, operator=0, enough_s=0.05)
    for plan_ahead in (False, True):
        result = run(files, simulated(), BATCHES[:2], virtual=True, rounds=rounds, plan_ahead=plan_ahead)
        counts = [(batch.stat_rounds, len(batch.rounds)) for batch in result.batches]
        assert counts == ([(5, 5), (4, 4)] if plan_ahead else [(4, 4), (3, 3)])
    rounds = Rounds(warmup=1, stat=6, operator=0, enough_s=0.0)
    result = run(files, simulated(), BATCHES[:2], virtual=True, rounds=rounds)
    assert [len(batch.rounds) for batch in result.batches] == [2, 2]


def test_two_passes_are_put_together(files: ModelFiles) -> None:
    made: list[Recorder] = []
    told: list[int] = []
    rounds = Rounds(warmup=1, stat=3, operator=1)
    result = run(
        *(files, inline(made), BATCHES[:2]),
        rounds=rounds,
        num_passes=2,
        on_round=lambda num_batches, *_: told.append(num_batches),
    )
    assert [batch.name for batch in result.batches] == ["decodes", "both"]
    for batch in result.batches:
        assert (batch.stat_rounds, len(batch.rounds), len(batch.operator_rounds)) == (6, 6, 2)
        assert batch.summary["step_ns"].max == max(sample.step_ns for sample in batch.rounds)
    assert told == [number for number in range(4) for _ in range(rounds.total)]
    first, second, third, fourth = rounds_of(made[0].plans)
    shapes = [
        [(row.start, row.num_tokens) for row in plans[0].rows] for plans in (first, second, third, fourth)
    ]
    assert shapes[:2] == shapes[2:]


def test_a_pass_that_is_cut_short_takes_nothing_away(files: ModelFiles) -> None:
    rounds = Rounds(warmup=0, stat=10, operator=0)
    once = run(files, simulated(), virtual=True, rounds=rounds)
    result = run(files, simulated(), virtual=True, rounds=rounds, num_passes=2, time_limit_s=1.0)
    assert result.skipped == ()
    assert [batch.name for batch in result.batches] == [batch.name for batch in once.batches]
    counts = [batch.stat_rounds for batch in result.batches]
    assert counts[0] == 20
    assert counts[-1] == 10


def test_a_batch_that_fails_in_one_pass_has_failed(files: ModelFiles) -> None:
    rounds_begun = []

    def fault(_number: int, plan: StepPlan) -> str | None:
        is_round = plan.rehearsal is not None and plan.rehearsal.fill_seed is None
        if is_round and len(plan.rows) == 4:
            rounds_begun.append(plan)
            return "out of memory" if len(rounds_begun) == ROUNDS.total + 4 else None
        return None

    result = run(files, simulated(fault=fault), virtual=True, num_passes=2)
    errors = failures(result)
    assert [error is None for error in errors] == [True, False, True, True]
    assert result.batches[1].rounds == ()


def failures(result: PerfResult) -> list[str | None]:
    return [batch.error for batch in result.batches]


def test_a_row_in_error_is_an_error_of_its_batch_only(files: ModelFiles) -> None:
    def tokens(request: Any, _position: int) -> int | str:
        return "the logits are NaN" if len(request.token_ids) == 130 else 7

    result = run(files, simulated(tokens=tokens), virtual=True)
    errors = failures(result)
    assert [error is None for error in errors] == [True, False, True, True]
    assert "the logits are NaN" in (errors[1] or "")
    failed = result.batches[1]
    assert (failed.rounds, failed.operator_rounds, failed.summary) == ((), (), {})
    assert failed.shape.num_forwarding_tokens == 33


def test_a_worker_that_dies_is_an_error_of_its_batch_only(files: ModelFiles) -> None:
    def fault(_number: int, plan: StepPlan) -> str | None:
        is_round = plan.rehearsal is not None and plan.rehearsal.fill_seed is None
        return "out of memory" if is_round and len(plan.rows) == 4 else None

    errors = failures(run(files, simulated(fault=fault), virtual=True))
    assert [error is None for error in errors] == [True, False, True, True]
    assert errors[1] == "the worker was lost: out of memory"


def test_a_worker_that_never_comes_back_fails_what_is_left(files: ModelFiles) -> None:
    def fault(_number: int, plan: StepPlan) -> str | None:
        return "gone" if len(plan.rows) == 4 else None

    def start_fault(epoch: int) -> str | None:
        return "no device" if epoch > 1 else None

    result = run(files, simulated(fault=fault, start_fault=start_fault), virtual=True)
    errors = failures(result)
    assert errors[0] is None
    assert all(error is not None for error in errors[1:])
    assert "no device" in (errors[3] or "")


def test_an_actor_that_breaks_is_an_error_of_its_batch_only(files: ModelFiles) -> None:
    def on_round(_number: int, name: str, num_done: int) -> None:
        if (name, num_done) == ("both", 3):
            raise RuntimeError("a bug")

    errors = failures(run(files, simulated(), virtual=True, on_round=on_round))
    assert errors == [None, "an actor of the engine broke; the log tells more", None, None]


def test_no_batch_begins_after_the_time_limit(files: ModelFiles) -> None:
    rounds = Rounds(warmup=0, stat=10, operator=0)
    result = run(files, simulated(), virtual=True, rounds=rounds, time_limit_s=0.2)
    assert [batch.name for batch in result.batches] == ["decodes"]
    assert result.skipped == ("both", "prefill", "layers")
    assert run(files, simulated(), virtual=True, time_limit_s=0).batches == ()
