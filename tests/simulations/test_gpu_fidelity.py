"""The comparison with a recorded run, on a made-up one: the record is a simulation's, so it must agree."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest

from benchmarks.gpu_fidelity import main, moved, recorded_times
from benchmarks.recorded_run import read_run
from benchmarks.recorded_world import Simulated, simulate
from benchmarks.serving_figures import figures
from ksana.costs.cost_file import CostModel
from ksana.perf.fitting import fit_profile
from tests.costs.profiles import write_profile

NUM_REQUESTS = 40
CLOCKS_APART_S = 1.7e9


def write_workload(directory: Path) -> None:
    rng = random.Random(5)
    lines, arrival_ns = [], 0
    for index in range(NUM_REQUESTS):
        arrival_ns += rng.randrange(4_000_000)
        request = {
            "arrival_time_ns": arrival_ns,
            "input_tok_ids": [1000 + (index * 7 + i * 3) % 500 for i in range(rng.randint(5, 200))],
            "output_toks": rng.randint(1, 60),
        }
        lines.append(json.dumps(request))
    (directory / "workload.jsonl").write_text("\n".join(lines))
    meta = {
        "model": "made up",
        "engine_kwargs": {"max_num_seqs": 16, "max_num_batched_tokens": 128},
        "kv_cache": {"num_gpu_blocks": 61, "block_size": 16, "enable_prefix_caching": True},
        "resolved_config": {
            "scheduler_config": {"async_scheduling": True, "scheduler_reserve_full_isl": True},
            "model_config": {"max_model_len": 512},
            "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
        },
    }
    (directory / "meta.json").write_text(json.dumps(meta))


def write_record(directory: Path, simulated: Simulated, *, slower: float = 1.0) -> None:
    lines = [
        json.dumps(
            {
                "arrival_time": times.arrival_s + CLOCKS_APART_S,
                "queued_ts": times.queued_s,
                "scheduled_ts": times.scheduled_s,
                "first_token_ts": times.first_token_s,
                "last_token_ts": times.first_token_s + slower * (times.last_token_s - times.first_token_s),
                "output_toks": times.num_output_tokens,
            }
        )
        for times in simulated.times
    ]
    (directory / "requests.jsonl").write_text("\n".join(lines))
    rows = [f"{s.t},{s.running},{s.waiting},{s.kv_cache_pct}" for s in simulated.samples]
    (directory / "timeseries.csv").write_text("\n".join(["t,running,waiting,kv_cache_pct", *rows]))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """All but the record, which is empty."""
    write_profile(tmp_path)
    write_workload(tmp_path)
    (tmp_path / "requests.jsonl").write_text("")
    (tmp_path / "timeseries.csv").write_text("t,running,waiting,kv_cache_pct\n")
    return tmp_path


def simulated_run(directory: Path) -> Simulated:
    model = fit_profile(directory, num_layers=64)
    return simulate(read_run(directory), CostModel(model.data, allow_extrapolation=True).step)


def test_a_run_agrees_with_itself(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulated = simulated_run(directory)
    assert len(simulated.times) == NUM_REQUESTS
    assert simulated.num_preemptions > 0
    write_record(directory, simulated)
    assert main([str(directory), "--num-layers", "64", "--again", "1"]) == 0
    printed = capsys.readouterr().out
    assert "more than" not in printed
    assert "made up, 40 requests, 64 decoder layers, 1 engine(s) of 1 device(s)" in printed
    assert len(simulated.samples) >= 1
    run = read_run(directory)
    for figure in figures(recorded_times(run), simulated.times):
        assert figure.simulated_s == pytest.approx(figure.recorded_s, rel=1e-6, abs=1e-6)


def test_one_that_is_slower_does_not(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_record(directory, simulated_run(directory), slower=1.1)
    assert main([str(directory), "--num-layers", "64"]) == 1
    (tpot,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("TPOT, mean")]
    assert "-9.09 %  more than 3 %" in tpot


def test_times_are_in_order_and_a_step_takes_what_the_tables_say(directory: Path) -> None:
    simulated = simulated_run(directory)
    for times in simulated.times:
        assert times.arrival_s <= times.queued_s <= times.scheduled_s
        assert times.scheduled_s < times.first_token_s <= times.last_token_s
    twice = fit_profile(directory, num_layers=128)
    slower = simulate(read_run(directory), CostModel(twice.data, allow_extrapolation=True).step)
    ratio = max(t.last_token_s for t in slower.times) / max(t.last_token_s for t in simulated.times)
    assert 1.7 < ratio < 2.0


def test_a_record_of_other_requests_is_refused(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulated = simulated_run(directory)
    write_record(directory, msgspec.structs.replace(simulated, times=simulated.times[1:]))
    assert main([str(directory), "--num-layers", "64"]) == 2
    assert "40 requests were asked and 39 served" in capsys.readouterr().err


def test_older_records_say_less_of_the_engine(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_record(directory, simulated_run(directory))
    meta = json.loads((directory / "meta.json").read_text())
    del meta["kv_cache"]
    # The defaults are what stood there, but for the graphs, which the tables' padding comes from.
    meta["resolved_config"] = {"compilation_config": meta["resolved_config"]["compilation_config"]}
    (directory / "meta.json").write_text(json.dumps(meta))
    assert main([str(directory), "--num-layers", "64"]) == 2
    assert "give --num-blocks" in capsys.readouterr().err
    assert main([str(directory), "--num-layers", "64", "--num-blocks", "61"]) == 0
    assert "latency, p99" in capsys.readouterr().out


def change_meta(directory: Path, part: str, **values: int) -> None:
    meta = json.loads((directory / "meta.json").read_text())
    meta[part].update(values)
    (directory / "meta.json").write_text(json.dumps(meta))


def test_layers_that_nothing_tells_are_refused(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_record(directory, simulated_run(directory))
    assert main([str(directory)]) == 2
    assert "nothing tells how many made up has" in capsys.readouterr().err
    (directory / "config.json").write_text(json.dumps({"num_hidden_layers": 64}))
    assert main([str(directory)]) == 0


def test_devices_that_share_a_model_need_what_connects_them(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(directory, simulated_run(directory))
    change_meta(directory, "engine_kwargs", tensor_parallel_size=2)
    sizes = [str(directory), "--num-layers", "64", "--hidden-size", "64", "--vocab-size", "1000"]
    assert main(sizes) == 2
    assert "nothing tells how long all_reduce over 2 devices takes" in capsys.readouterr().err
    assert main([*sizes, "--link-gb-per-s", "50"]) == 2
    assert "--link-latency-us, both of them" in capsys.readouterr().err
    fast = ["--link-gb-per-s", "1000", "--link-latency-us", "0"]
    assert main([*sizes, *fast]) == 0
    printed = capsys.readouterr().out
    assert "1 engine(s) of 2 device(s)" in printed
    assert "NOTE: the tables are taken to be of one device's share of 2" in printed
    assert "129 times a step: all_reduce over 2 devices, 128 bytes per token" in printed
    assert main([*sizes, "--link-gb-per-s", "50", "--link-latency-us", "20"]) == 1
    assert "more than 3 %" in capsys.readouterr().out
    (directory / "communication.csv").write_text(
        "op,num_devices,bytes,us\nall_reduce,2,1,0\nall_reduce,2,9,0"
    )
    assert main(sizes) == 2
    assert "how long all_gather over 2 devices takes" in capsys.readouterr().err


def test_several_engines_share_the_requests(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = simulated_run(directory)
    change_meta(directory, "engine_kwargs", data_parallel_size=3)
    several = simulated_run(directory)
    assert len(several.times) == NUM_REQUESTS
    assert several.num_prompt_tokens >= one.num_prompt_tokens
    assert max(t.last_token_s for t in several.times) < max(t.last_token_s for t in one.times)
    write_record(directory, several)
    assert main([str(directory), "--num-layers", "64"]) == 0
    assert "3 engine(s) of 1 device(s)" in capsys.readouterr().out


def test_stages_are_refused(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_record(directory, simulated_run(directory))
    change_meta(directory, "engine_kwargs", pipeline_parallel_size=2)
    assert main([str(directory), "--num-layers", "64"]) == 2
    assert "2 stages (pipeline_parallel_size), which is not simulated" in capsys.readouterr().err


def test_a_request_that_cannot_be_served_is_one_line(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(directory, simulated_run(directory))
    change_meta(directory, "kv_cache", num_gpu_blocks=4)
    assert main([str(directory), "--num-layers", "64"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: request ")
    assert err.count("\n") == 1


def test_order_of_the_workload_and_samples_over_time_are_not_needed(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(directory, simulated_run(directory))
    asked = (directory / "workload.jsonl").read_text().splitlines()
    (directory / "workload.jsonl").write_text("\n".join(reversed(asked)))
    (directory / "timeseries.csv").unlink()
    assert main([str(directory), "--num-layers", "64"]) == 0
    assert "0 s recorded" in capsys.readouterr().out


def test_arrivals_move_a_little_and_stay_in_order(directory: Path) -> None:
    run = read_run(directory)
    other = moved(run, seed=3)
    pairs = list(zip(run.asked, other.asked, strict=True))
    assert all(abs(a.arrival_time_ns - b.arrival_time_ns) <= 2_000_000 for a, b in pairs)
    assert any(a.arrival_time_ns != b.arrival_time_ns for a, b in pairs)
    times = [asked.arrival_time_ns for asked in other.asked]
    assert times == sorted(times)
    assert msgspec.structs.replace(other, asked=run.asked) == run


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("workload.jsonl", None),
        ("workload.jsonl", '{"arrival_time_ns": 0, "input_tok_ids": [-1], "output_toks": 1}'),
        ("workload.jsonl", '{"arrival_time_ns": 0, "input_tok_ids": [], "output_toks": 1}'),
        ("workload.jsonl", '{"arrival_time_ns": 0, "input_tok_ids": [1], "output_toks": 0}'),
        ("workload.jsonl", '{"arrival_time_ns": 1e18, "input_tok_ids": [1], "output_toks": 1}'),
        ("workload.jsonl", "[" * 100_000),
        ("meta.json", "{}"),
        ("requests.jsonl", '{"queued_ts": "late"}'),
        ("timeseries.csv", "t,running\n1,many"),
        ("attention.csv", "prefill_chunk,kv_prefill\n1,2"),
        ("dense.csv", "layer,tokens,time_us\nqkv_proj,1,-3"),
    ],
)
def test_wrong_files_are_named(
    directory: Path, name: str, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_text(content)
    assert main([str(directory), "--num-layers", "64"]) == 2
    assert name in capsys.readouterr().err
