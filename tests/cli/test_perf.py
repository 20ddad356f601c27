"""`ksana perf` as it is typed: files in, a result out, exit codes; with a worker process and a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ksana.cli.main import main
from ksana.cli.perf import _report, _settings
from ksana.cli.perf_flags import ONLY_SERVING, parse_flags
from ksana.cli.settings import flags_layer
from ksana.costs.cost_file import load_cost
from ksana.perf.batches import read_batches
from ksana.perf.result import PerfResult, read_result
from tests.costs.profiles import write_profile
from tests.costs.test_profile_cost import shape
from tests.models_for_tests import smollm2_gguf, tiny_gemma3_dir, tiny_llama_gguf
from tests.processes import PATIENCE_S
from tests.server.process import COMMAND

SMALL = ("--max-model-len", "128", "--max-num-batched-tokens", "32", "--kv-cache-memory", "1MiB")
DECODES = {"name": "decodes", "requests": [{"sequence_len": 50, "forwarding_token_num": 1, "request_num": 4}]}
PREFILL = {"name": "prefill", "requests": [{"sequence_len": 30, "forwarding_token_num": 30}]}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KSANA_") and name != "KSANA_KERNELS"]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama_gguf(tmp_path_factory.mktemp("model"))


def write_config(directory: Path, batches: Any, **config: Any) -> Path:
    (directory / "batches.json").write_text(json.dumps(batches))
    file = directory / "config.json"
    defaults = {"batch_config_file": "batches.json", "warmup_rounds": 1, "stat_rounds": 3}
    file.write_text(json.dumps(defaults | config))
    return file


def ksana_perf(*argv: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "perf", *map(str, argv)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=cwd,
        check=False,
    )


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """Exit code 2 and one line, before anything runs."""
    assert main(["perf", *map(str, argv)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ksana: ")
    assert err.count("\n") == 1
    return err


def test_a_file_is_measured_and_plotted(model: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, {"batches": [DECODES, PREFILL]}, output_file="r.json", seed=7)
    done = ksana_perf(model, "--config", config, "--plot", *SMALL)
    assert done.returncode == 0, done.stderr
    result = read_result(tmp_path / "r.json")
    assert [batch.name for batch in result.batches] == ["decodes", "prefill"]
    for batch in result.batches:
        assert batch.error is None
        assert (len(batch.rounds), len(batch.operator_rounds)) == (3, 3)
        assert batch.summary["forward_ns"].min > 0
    assert (result.seed, result.plan_ahead, result.max_num_batched_tokens) == (7, False, 32)
    assert "native" in result.device or "torch" in result.device
    lines = done.stdout.splitlines()
    assert lines[1].split()[:4] == ["decodes", "4", "4", "196"]
    assert lines[-2:] == [f"result: {tmp_path / 'r.json'}", f"charts: {tmp_path / 'r.html'}"]
    assert "14/14" in done.stderr
    html = (tmp_path / "r.html").read_text()
    assert "<svg" in html
    assert "paged_attention" in html
    assert sorted(os.listdir(tmp_path)) == ["batches.json", "config.json", "r.html", "r.json"]


def test_the_older_form_windows_and_planning_ahead(tmp_path: Path) -> None:
    requests = [{"sequence_len": 100, "forwarding_token_num": 1, "request_num": 2}]
    batches = {"batch_0": {"dp_0": requests, "layer_forward_round": 4}, "batch_1": {"dp_0": requests}}
    config = write_config(tmp_path, batches)
    done = ksana_perf(
        *(tiny_gemma3_dir(tmp_path), "--config", config, "--plan-ahead", "--operator-rounds", 0),
        *("--max-model-len", 128, "--max-num-batched-tokens", 32, "--kv-cache-memory", "4MiB"),
    )
    assert done.returncode == 0, done.stderr
    result = read_result(tmp_path / "model_perf_result.json")
    assert result.plan_ahead
    assert [batch.layer_forward_round for batch in result.batches] == [4, 1]
    # Of 99 tokens and a window of 32 only the blocks from token 64 on are left.
    assert [(b.shape.num_fa_blocks, b.shape.num_swa_blocks) for b in result.batches] == [(14, 6)] * 2
    assert all(batch.operator_rounds == () for batch in result.batches)


def test_a_batch_that_fails_is_an_error_and_the_others_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def measured(*_args: object, **_kwargs: object) -> PerfResult:
        whole = read_result(tmp_path / "model_perf_result.json")
        bad = msgspec_replace(whole.batches[0], rounds=(), summary={}, error="the worker was lost: it died")
        return msgspec_replace(whole, batches=(bad, whole.batches[1]))

    config = write_config(tmp_path, {"batches": [DECODES, PREFILL]})
    assert main(["perf", str(model), "--config", str(config), *SMALL]) == 0
    capsys.readouterr()
    monkeypatch.setattr("ksana.cli.perf.measure", measured)
    assert main(["perf", str(model), "--config", str(config), "--plot", *SMALL]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[1].split()[-1] == "failed"
    assert "ksana: batch 'decodes' failed: the worker was lost: it died\n" in err
    assert read_result(tmp_path / "model_perf_result.json").batches[0].error is not None
    assert "the worker was lost" in (tmp_path / "model_perf_result.html").read_text()


def msgspec_replace(struct: Any, **changes: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(struct, **changes)


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ({"batches": [{**DECODES, "extra": 1}]}, "batches.json: batch 'decodes': 'extra': unknown key"),
        (
            {"batches": [{"name": "x", "requests": [{"sequence_len": 128, "forwarding_token_num": 1}]}]},
            "batches.json: batch 'x': sequence_len: is 128, but a context of 128",
        ),
        (
            {"batches": [{"name": "x", "requests": [{"sequence_len": 33, "forwarding_token_num": 33}]}]},
            "batches.json: batch 'x': forwarding_token_num: makes 33 tokens, but a step has 32",
        ),
        (
            {
                "batches": [
                    {
                        "name": "x",
                        "requests": [{"sequence_len": 120, "forwarding_token_num": 1, "request_num": 30}],
                    }
                ]
            },
            "batches.json: batch 'x': sequence_len: needs 240 KV blocks",
        ),
        ({"batch_0": {"dp_0": [], "dp_1": []}}, "batches.json: batch 'batch_0': dp_1: data parallelism"),
    ],
)
def test_what_cannot_be_run_is_said_before(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], batches: Any, said: str
) -> None:
    config = write_config(tmp_path, batches)
    assert said in refused(capsys, model, "--config", config, *SMALL)
    assert not (tmp_path / "model_perf_result.json").exists()


def test_files_that_are_missing_or_cannot_be_written(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no.json: cannot be read" in refused(capsys, model, "--config", tmp_path / "no.json")
    config = write_config(tmp_path, {"batches": [DECODES]}, batch_config_file="other.json")
    assert "other.json: cannot be read: No such file" in refused(capsys, model, "--config", config)
    config = write_config(tmp_path, {"batches": [DECODES]}, output_file="no/r.json")
    assert "output_file" in refused(capsys, model, "--config", config, *SMALL)
    config = write_config(tmp_path, {"batches": [DECODES]}, seeds=1)
    assert "config.json: 'seeds': unknown key" in refused(capsys, model, "--config", config)


def test_files_that_would_replace_each_other(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for output, flags, said in (
        ("batches.json", (), "output_file {} would replace the batch_config_file"),
        ("config.json", (), "output_file {} would replace the --config file"),
        (str(model), (), "output_file {} would replace the model"),
        ("r.html", ("--plot",), "--plot page {} would replace the output_file"),
        ("r.json", ("--cost-file", tmp_path / "batches.json"), "--cost-file {} would replace the batch_con"),
    ):
        config = write_config(tmp_path, {"batches": [DECODES]}, output_file=output)
        before = (model.read_bytes(), config.read_bytes(), (tmp_path / "batches.json").read_bytes())
        refusal = refused(capsys, model, "--config", config, *flags, *SMALL)
        written = flags[1] if len(flags) == 2 else tmp_path / output
        assert said.format(written) in refusal
        assert (model.read_bytes(), config.read_bytes(), (tmp_path / "batches.json").read_bytes()) == before
    assert "--cost-file r.json would replace the result" in refused(
        capsys, "--fit", "r.json", "--cost-file", "r.json"
    )


def test_a_cost_file_of_too_few_batches_is_refused_before(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, {"batches": [DECODES] * 7})
    refusal = refused(capsys, model, "--config", config, "--cost-file", tmp_path / "c.json", *SMALL)
    assert "batches.json: 7 batches with a layer_forward_round of 1, but a fit" in refusal


def test_a_full_disk_is_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, result: PerfResult) -> None:  # noqa: ARG001
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ksana.cli.perf.write_result", full)
    config = write_config(tmp_path, {"batches": [DECODES]}, output_file="r.json")
    assert main(["perf", str(model), "--config", str(config), *SMALL]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"ksana: cannot write beside {tmp_path / 'r.json'}: No space left on device"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "give one of --config, --sweep and --fit (neither was given)"),
        (("--config", "a", "--sweep"), "give one of --config, --sweep and --fit (--config and --sweep)"),
        (("--config", "a", "--quick"), "--quick has no meaning with --config"),
        (("--config", "a", "--output", "b"), "--output has no meaning with --config"),
        (("--sweep", "--num-layers", "3"), "--num-layers has no meaning with --sweep"),
        (("--sweep", "--time-limit", "0"), "'0' is not a whole number from 1"),
        (("--sweep", "--operator-rounds", "-1"), "--operator-rounds"),
        (("--fit", "a"), "--fit needs --cost-file"),
        (("--fit", "a", "--cost-file", "b", "--plot"), "--plot has no meaning with --fit"),
        (("smollm2-135m", "--fit", "a", "--cost-file", "b"), "MODEL has no meaning with --fit"),
        (("--fit", "a", "--cost-file", "b", "--block-size", "16"), "--block-size has no meaning with --fit"),
        (("--fit", ".", "--cost-file", "b"), "say with --num-layers how many there are"),
        (("--fit", "missing", "--cost-file", "b"), "missing cannot be read"),
        (
            ("--fit", "missing", "--cost-file", "b", "--unequal-kv"),
            "--unequal-kv has no meaning for a result",
        ),
        (("--sweep", "--unequal-kv"), "--unequal-kv has no meaning with --sweep"),
        (("--sweep", "--port", "8000"), "--port has no meaning for `ksana perf`"),
        (("--sweep", "--host=::1"), "--host has no meaning"),
        (("--sweep", "--api-key", "x"), "--api-key has no meaning"),
        (("--sweep", "--no-remote-write-back"), "--no-remote-write-back has no meaning"),
        (("--sweep", "--drain-timeout", "1"), "--drain-timeout has no meaning"),
        (("--swep",), "unknown flag --swep (did you mean --sweep?)"),
        (("--sweep", "--remote-cache", "file:///tmp/x"), "remote_cache has no meaning"),
        (("--sweep", "--settings", "missing.yaml"), "settings file missing.yaml cannot be read"),
    ],
)
def test_flags_that_do_not_fit(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], said: str) -> None:
    assert said in refused(capsys, *argv)


def test_profile_tables_become_a_cost_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_profile(tmp_path)
    cost_file = tmp_path / "cost.json"
    fit = ["perf", "--fit", str(tmp_path), "--cost-file", str(cost_file), "--num-layers", "2"]
    assert main(fit) == 0
    assert "attention, each chunk from its neighbours: " in capsys.readouterr().out
    model = load_cost(cost_file)
    assert model.step.seconds(shape(decodes=2, kv=64)) > 0
    assert "skew.csv" in refused(capsys, *fit[1:], "--unequal-kv")


def test_a_model_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, {"batches": [DECODES]})
    assert main(["perf", str(tmp_path / "none.gguf"), "--config", str(config)]) == 3
    assert capsys.readouterr().err.startswith("ksana: ")


def test_a_sweep_makes_a_cost_model_in_one_go(model: Path, tmp_path: Path) -> None:
    done = ksana_perf(
        *(model, "--sweep", "--quick", "--cost-file", "cost.json", "--output", "sweep.json", "--plot"),
        *("--time-limit", 40),
        *(*SMALL, "--max-num-seqs", 8),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(tmp_path)) == ["cost.json", "sweep.html", "sweep.json", "sweep_batches.json"]
    result = read_result(tmp_path / "sweep.json")
    batches = read_batches(tmp_path / "sweep_batches.json")
    assert len(result.batches) + len(result.skipped) == len(batches) >= 20
    cost = load_cost(tmp_path / "cost.json")
    assert cost.host_s > 0
    assert cost.errors
    assert "cost model: cost.json" in done.stdout
    again = ksana_perf("--fit", "sweep.json", "--cost-file", "again.json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "cost.json").read_bytes()


@pytest.mark.slow
def test_the_demo_model_is_measured_when_none_is_named(tmp_path: Path) -> None:
    smollm2_gguf()  # fetched before, or the test is skipped
    config = write_config(tmp_path, {"batches": [DECODES, PREFILL]})
    done = ksana_perf("--config", config, "--kv-cache-memory", "256MiB", "--max-model-len", 512)
    assert done.returncode == 0, done.stderr
    result = read_result(tmp_path / "model_perf_result.json")
    assert result.model == "smollm2-135m"
    for batch in result.batches:
        parts = [batch.summary[part].mean for part in ("forward_ns", "prepare_ns", "sampling_ns")]
        assert sum(parts) <= batch.summary["step_ns"].mean
        shares = batch.operator_rounds[0]
        assert sum(sample.total_ns for sample in shares.values()) > 0.5 * batch.summary["forward_ns"].min


def test_help_lists_no_flag_without_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["perf", "--help"])
    shown = capsys.readouterr().out
    assert "--block-size" in shown
    assert all(f"--{name.replace('_', '-')} " not in shown for name in ONLY_SERVING)


def test_variables_of_serve_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSANA_PORT", "9000")
    own, flags = parse_flags(["--sweep"])
    assert _settings(own, flags_layer(flags)).port == 9000


def test_an_interrupted_result_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = PerfResult(
        model="m",
        model_fingerprint="f",
        device="cpu",
        dtype="float32",
        parallel_sizes={},
        block_size=16,
        versions={},
        plan_ahead=False,
        seed=1,
        max_num_batched_tokens=32,
        max_num_seqs=4,
        max_model_len=128,
        batches=(),
        skipped=("a", "b"),
        interrupted="SIGINT",
    )
    own, _ = parse_flags(["--sweep", "--cost-file", str(tmp_path / "cost.json")])
    assert _report(own, tmp_path / "r.json", result) == 130
    assert "interrupted by SIGINT: the result has 0 of 2 batches" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
