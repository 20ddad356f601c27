"""The simulation keeps the promises, says every message there is, and repeats itself bit for bit."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys

import msgspec
import pytest

import ksana.messages
from ksana.messages.base import Message
from simulations.smoke import SmokeReport, run_smoke


@pytest.fixture(scope="module")
def report() -> SmokeReport:
    return run_smoke(seed=1)


def every_message_type() -> set[str]:
    for module in pkgutil.iter_modules(ksana.messages.__path__, "ksana.messages."):
        importlib.import_module(module.name)

    def leaves(kind: type[Message]) -> set[str]:
        below = kind.__subclasses__()
        return set().union(*map(leaves, below)) if below else {kind.__name__}

    return leaves(Message)


OF_OTHER_PRODUCERS = {"AddInferRequest", "InferBatchReady", "RunInferRound"}
"""Only the performance backend says these and is told them; `tests/perf` exercises them on a whole engine."""


def test_every_message_type_is_said_and_there_are_many(report: SmokeReport) -> None:
    assert set(report.messages) == every_message_type() - OF_OTHER_PRODUCERS
    assert report.num_messages >= 10_000


def test_it_is_rough(report: SmokeReport) -> None:
    assert report.num_preemptions > 0
    assert report.num_worker_restarts > 0
    assert report.num_hit_tokens > 0
    assert report.num_swa_evictions > 0
    assert report.num_remote_hit_tokens > 0
    assert report.remote.num_breaker_openings > 0
    assert {"loaded", "partial", "nothing", "no_room", "store_failed", "cancelled"} <= dict(
        report.remote.num_loads
    ).keys()
    assert {"finished stop", "finished length", "left", "failed 400", "failed 503", "failed 504"} <= set(
        report.endings
    )


def test_the_same_seed_says_the_same_in_another_process(report: SmokeReport) -> None:
    for hash_seed in ("1", "2"):
        out = subprocess.run(
            [sys.executable, "-m", "simulations", "smoke", "--seed", "1"],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        assert msgspec.json.decode(out, type=SmokeReport) == report


def test_another_seed_says_something_else(report: SmokeReport) -> None:
    assert run_smoke(seed=3).digest != report.digest


def test_without_sliding_layers() -> None:
    report = run_smoke(seed=3, num_requests=150, sliding_window=None)
    assert not any(name.startswith("Swa") for name in report.messages)
    assert report.num_hit_tokens > 0
    assert report.num_remote_hit_tokens > 0
