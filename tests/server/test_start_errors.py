"""Starts that cannot work: one line that says why, the right exit code, nothing left behind."""

from __future__ import annotations

import re
import shutil
import socket
from pathlib import Path

import pytest

from tests.server.conftest import Serve


def refused(serve: Serve, *flags: str, code: int, model: str | None = None, **environ: str) -> str:
    """The one line of a server that does not start."""
    ended, out, err = serve(*flags, model=model, environ=environ).wait()
    assert (ended, out) == (code, ""), err
    assert "Traceback" not in err
    (line,) = (line for line in err.splitlines() if not line.startswith("Loading"))
    assert line.startswith("ksana: ")
    return line


def test_a_port_in_use(serve: Serve) -> None:
    """Found before the model is looked at, which would be the other error."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        line = refused(serve, "--port", port, model="/no/such/model", code=2)
    assert f"port {port}" in line
    assert "in use" in line


@pytest.mark.slow
def test_flags_and_variables_that_do_not_exist(serve: Serve, tmp_path: Path) -> None:
    assert "did you mean --max-num-seqs" in refused(serve, "--max-num-sequences", "4", code=2)
    assert "KSANA_MAX_MODEL_LEN" in refused(serve, code=2, KSANA_MAX_MODEL_LENGTH="5")
    assert "--block-size" in refused(serve, "--block-size", "17", code=2)
    file = tmp_path / "settings.yaml"
    file.write_text("max_modellen: 5\n")
    assert "max_model_len" in refused(serve, "--config", str(file), code=2)
    assert "no-such" in refused(serve, "--api-key-file", "/no-such/file", code=2)


@pytest.mark.slow
def test_models_that_cannot_be_loaded(serve: Serve, tiny_model: Path, tmp_path: Path) -> None:
    assert "/no/such/model.gguf" in refused(serve, model="/no/such/model.gguf", code=3)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json" in refused(serve, model=str(empty), code=3)
    cut = shutil.copytree(tiny_model, tmp_path / "cut")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors" in refused(serve, model=str(cut), code=3)
    rubbish = tmp_path / "rubbish.gguf"
    rubbish.write_bytes(b"GGUF" + b"\xff" * 1000)
    assert "rubbish.gguf" in refused(serve, model=str(rubbish), code=3)


@pytest.mark.parametrize("memory", ["256KiB", pytest.param("1000KiB", marks=pytest.mark.slow)])
def test_a_pool_that_is_too_small(serve: Serve, memory: str) -> None:
    """It names the largest length that fits; with that it starts, with one more it does not."""
    line = refused(serve, "--kv-cache-memory", memory, code=2)
    fits = max(int(number) for number in re.findall(r"\b\d+\b", line) if int(number) < 2048)
    flags = ("--kv-cache-memory", memory, "--max-model-len")
    server = serve(*flags, str(fits))
    with server.http() as http:
        # And it is true: a request of that length runs to its end.
        body = {"prompt": [5], "max_tokens": fits - 1, "temperature": 0, "ignore_eos": True}
        usage = http.post("/v1/completions", json=body).raise_for_status().json()["usage"]
    assert usage["total_tokens"] == fits
    assert str(fits) in refused(serve, *flags, str(fits + 1), code=2)


@pytest.mark.slow
def test_a_pool_that_holds_nothing(serve: Serve) -> None:
    assert "kv-cache-memory" in refused(serve, "--kv-cache-memory", "4KiB", code=2)
    assert "kv-cache-memory" in refused(serve, "--kv-cache-memory", "many", code=2)


def test_longer_than_the_model_was_made_for(serve: Serve) -> None:
    line = refused(serve, "--max-model-len", "4096", code=2)
    assert "4096" in line
    assert "2048" in line
