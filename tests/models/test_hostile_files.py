"""Hostile and broken model files: one clear line each, soon and in little memory, or served as they should.

Each case is opened as `ksana check` and `ksana serve` do, within 500 MB of memory. The bound on time is
generous, as it holds on any machine: most cases take some 10 ms, the slowest about a second.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ksana.errors import ModelLoadError
from ksana.models.load import fingerprint, read_spec
from ksana.models.sources import resolve_model
from ksana.shown import one_line
from ksana.tokenizers import load_tokenizer
from tests.models.hostile_files import CASES, Case
from tests.models_for_tests import tiny_llama_dir, tiny_llama_gguf

MAX_SECONDS = 20.0
MAX_BYTES = 500 << 20
PROMPT = "The thing <|im_start|> on and on"


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The clean directory and the clean GGUF file that the cases change."""
    scratch = tmp_path_factory.mktemp("clean")
    return tiny_llama_dir(scratch), tiny_llama_gguf(scratch)


def made(case: Case, clean: tuple[Path, Path], tmp_path: Path) -> Path:
    directory, gguf = clean
    if case.is_gguf:
        path = shutil.copy(gguf, tmp_path / "model.gguf")
    else:
        path = shutil.copytree(directory, tmp_path / "model")
    case.make(path)
    return path


def opened(path: Path) -> tuple[str, list[int], tuple[int, ...]]:
    """What a server finds out about a model before a worker loads its weights."""
    found = fingerprint(path)
    tokenizer = load_tokenizer(path, None, read_spec(path).vocab_size)
    return found, tokenizer.encode(PROMPT), tokenizer.eos_ids


@pytest.fixture
def bounded() -> Iterator[None]:
    """Less memory than the process has now and MAX_BYTES more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + MAX_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def test_there_are_many_cases_each_with_a_name_of_its_own() -> None:
    assert len(CASES) >= 150
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name[:60])
def test_hostile_file(case: Case, clean: tuple[Path, Path], tmp_path: Path) -> None:
    path = made(case, clean, tmp_path)
    start = time.process_time()
    if case.says is None:
        reference = opened(clean[1] if case.is_gguf else clean[0])
        assert opened(path)[1:] == reference[1:]
    else:
        with pytest.raises(ModelLoadError) as caught:
            opened(path)
        line = one_line(str(caught.value))
        assert case.says in line
        assert str(path) in line
        assert line.isprintable()
        assert len(line) < 1000
    assert time.process_time() - start < MAX_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[::7], ids=lambda case: case.name[:60])
def test_hostile_file_at_the_command_line(case: Case, clean: tuple[Path, Path], tmp_path: Path) -> None:
    path = made(case, clean, tmp_path)
    small = ["--max-model-len", "64", "--max-num-batched-tokens", "32", "--kv-cache-memory", "1MiB"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (2 * MAX_BYTES, 2 * MAX_BYTES))

    ran = subprocess.run(
        [sys.executable, "-m", "ksana.cli.main", "check", str(path), *small],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=limit,
        check=False,
    )
    if case.says is None:
        assert (ran.returncode, ran.stderr) == (0, "")
    else:
        assert ran.returncode == ModelLoadError.exit_code
        (line,) = ran.stderr.splitlines()
        assert line.startswith("ksana: ")
        assert case.says in line


def test_a_model_that_is_a_pipe_is_no_model(tmp_path: Path) -> None:

    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ModelLoadError, match=r"is no directory or \.gguf file"):
        resolve_model(str(tmp_path / "model.gguf"))
