"""`ksana check` on tiny models: what it counts, what fits, what does not, and that no torch is needed."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from ksana.cli.main import main
from tests.models_for_tests import tiny_gemma3_dir, tiny_llama_gguf
from tests.tiny_models import gemma3_config


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KSANA_API_KEY", raising=False)


def check(*argv: object) -> int:
    return main(["check", *map(str, argv), "--max-model-len", "64", "--max-num-batched-tokens", "32"])


def test_a_model_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_llama_gguf(tmp_path)
    assert check(path, "--kv-cache-memory", "1MiB") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"{path.stem}\n")
    for part in (
        str(path),
        "llama: 3 layers",
        "320 tokens known",
        "KV pool",
        "64 tokens of prompt and output",
    ):
        assert part in out
    assert out.endswith("  fits     yes\n")


def test_windows_and_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors import safe_open

    path = tiny_gemma3_dir(tmp_path)
    assert check(path, "--kv-cache-memory", "8MiB") == 0
    out = capsys.readouterr().out
    num_parameters = 0
    for file in path.glob("*.safetensors"):
        with safe_open(file, "np") as tensors:
            num_parameters += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118 - not a dict
    assert f"{num_parameters / 1e6:,.1f} million" in out
    assert f"(5 with a window of {gemma3_config()['sliding_window']} tokens)" in out
    assert "for the layers with a window" in out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--kv-cache-memory", "20KiB"], "the largest --max-model-len that fits is"),
        (["--kv-cache-memory", "900TiB"], "kv_cache_memory asks for 900 TiB, but only"),
        (["--chat-template", "/nowhere"], "/nowhere cannot be read"),
    ],
)
def test_what_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert check(tiny_llama_gguf(tmp_path), *flags) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_weights_count_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool alone would fit."""
    monkeypatch.setattr("ksana.cli.check.available_memory_bytes", lambda: 1 << 20)
    assert check(tiny_llama_gguf(tmp_path), "--kv-cache-memory", "1MiB") == 2
    out, err = capsys.readouterr()
    assert out.endswith("  fits     no\n")
    assert "are needed and 1.00 MiB are free" in err


def test_a_system_that_does_not_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("ksana.cli.check", "ksana.model_setup"):
        monkeypatch.setattr(f"{module}.available_memory_bytes", lambda: None)
    assert check(tiny_llama_gguf(tmp_path), "--kv-cache-memory", "1MiB") == 0
    assert capsys.readouterr().out.endswith("  fits     unknown\n")


def test_a_broken_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_llama_gguf(tmp_path)
    path.write_bytes(path.read_bytes()[:-1000])
    assert check(path) == 3
    assert str(path) in capsys.readouterr().err


def test_no_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from ksana.cli.main import main\n"
        "assert main(['check', sys.argv[1], '--max-model-len', '64', '--kv-cache-memory', '1MiB']) == 0\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_llama_gguf(tmp_path))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
