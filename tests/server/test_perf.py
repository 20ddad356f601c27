"""`ksana perf` as a process: its worker is killed, or it is interrupted, in the middle of a batch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ksana.perf.result import read_result
from tests.models_for_tests import tiny_llama_gguf
from tests.processes import PATIENCE_S, WORKER, children_that_run, eventually, is_running, read_to_the_end
from tests.server.process import COMMAND

pytestmark = pytest.mark.slow


class PerfProcess:
    """Runs from its making on; reads stderr, where the progress bar is."""

    def __init__(self, *argv: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "perf", *argv], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=False
        )
        self._parts: list[bytes] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        while part := os.read(self.process.stderr.fileno(), 4096):
            self._parts.append(part)

    @property
    def log(self) -> str:
        return b"".join(self._parts).decode(errors="replace")

    def wait_until_it_measures(self) -> None:
        eventually(lambda: re.search(r"\| [0-9]+/[0-9]+ \[", self.log), explain=lambda: self.log)

    def worker(self) -> int:
        return children_that_run(WORKER, self.process.pid)[0]

    def wait(self) -> int:
        code = self.process.wait(timeout=PATIENCE_S)
        read_to_the_end(self._reader)
        return code


@contextmanager
def running(tmp_path: Path, rounds: tuple[int, int]) -> Iterator[PerfProcess]:
    """Two batches; the first of them runs so long that it is surely met."""
    requests = [{"sequence_len": 100, "forwarding_token_num": 1, "request_num": 8}]
    batches = {"batches": [{"name": name, "requests": requests} for name in ("first", "second")]}
    (tmp_path / "b.json").write_text(json.dumps(batches))
    config = {"batch_config_file": "b.json", "warmup_rounds": rounds[0], "stat_rounds": rounds[1]}
    (tmp_path / "c.json").write_text(json.dumps(config))
    model = tiny_llama_gguf(tmp_path)
    limits = ("--max-model-len", "128", "--kv-cache-memory", "1MiB")
    perf = PerfProcess(str(model), "--config", str(tmp_path / "c.json"), *limits)
    try:
        yield perf
    finally:
        perf.process.kill()
        perf.wait()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the worker in /proc")
def test_a_worker_that_is_killed_costs_one_batch(tmp_path: Path) -> None:
    with running(tmp_path, (0, 5000)) as perf:
        perf.wait_until_it_measures()
        os.kill(perf.worker(), signal.SIGKILL)
        assert perf.wait() == 1, perf.log
    first, second = read_result(tmp_path / "model_perf_result.json").batches
    assert first.error is not None
    assert "the worker was lost" in first.error
    assert "SIGKILL" in first.error
    assert second.error is None
    assert len(second.rounds) == 5000
    assert "batch 'first' failed" in perf.log


def test_ctrl_c_leaves_no_worker_and_a_result_that_says_so(tmp_path: Path) -> None:
    with running(tmp_path, (0, 100_000)) as perf:
        perf.wait_until_it_measures()
        worker = perf.worker()
        perf.process.send_signal(signal.SIGINT)
        assert perf.wait() == 130, perf.log
        eventually(lambda: not is_running(worker))
    result = json.loads((tmp_path / "model_perf_result.json").read_text())
    assert result["interrupted"]
    assert result["skipped"] == ["first", "second"]
    assert "Traceback" not in perf.log
