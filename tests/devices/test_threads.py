import os

import pytest

from ksana.devices import threads


def test_hyperthreads_of_a_core_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    siblings = {"cpu0": "0-1", "cpu1": "0-1", "cpu2": "2-3", "cpu3": "2-3"}
    files = {f"/sys/devices/system/cpu/{c}/topology/thread_siblings_list": s for c, s in siblings.items()}
    monkeypatch.setattr(threads, "_read", lambda path: files.get(str(path), ""))
    assert threads.default_num_threads() == 2
    files["/sys/fs/cgroup/cpu.max"] = "150000 100000"
    assert threads.default_num_threads() == 1
    files.clear()
    assert threads.default_num_threads() == 4


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("max 100000", None), ("", None), ("50000 100000", 1), ("400000 100000", 4), ("1 0", None)],
)
def test_quota(text: str, cpus: int | None) -> None:
    assert threads._quota_cpus(text) == cpus


def test_there_is_at_least_one_thread_here() -> None:
    assert threads.default_num_threads() >= 1
