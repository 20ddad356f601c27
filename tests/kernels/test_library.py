"""Building, caching, choosing and threading of the native library."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from ksana import kernels
from ksana.kernels import build, library, threads

pytestmark = pytest.mark.needs_program("gcc", "gcc")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ksana" / "kernels"


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Path:
    """One small source instead of all of them."""
    directory = tmp_path / "sources"
    directory.mkdir()
    (directory / "one.c").write_text("int one(void) { return 1; }\n")
    monkeypatch.setattr(build, "SOURCES", directory)
    return directory


@pytest.fixture
def unchosen(monkeypatch):
    monkeypatch.setattr(library, "_choice", None)
    monkeypatch.delenv("KSANA_KERNELS", raising=False)


@pytest.mark.usefixtures("sources")
def test_builds_once(cache):
    first = build.build()
    assert first.parent == cache
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    before = first.stat()
    assert build.build() == first
    assert first.stat().st_mtime_ns == before.st_mtime_ns
    assert [path.name for path in cache.iterdir()] == [first.name]


@pytest.mark.usefixtures("cache")
def test_other_sources_make_another_library(sources):
    first = build.build()
    (sources / "one.c").write_text("int one(void) { return 2; }\n")
    assert build.build() != first


@pytest.mark.usefixtures("sources")
def test_what_others_may_write_is_not_loaded(cache):
    build.build()
    cache.chmod(0o777)
    with pytest.raises(build.BuildError, match="writable by nobody else"):
        build.build()
    cache.chmod(0o700)
    build.build().chmod(0o722)
    with pytest.raises(build.BuildError, match="writable by nobody else"):
        build.build()


@pytest.mark.usefixtures("sources")
def test_no_place_for_a_cache(tmp_path, monkeypatch, caplog):
    """A file stands where the directory should: compiled for this process only, and said so."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = build.build()
    assert path.exists()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert "compiled at every start" in caplog.text


def test_several_processes_at_once(cache, sources):
    script = f"""
import importlib.util, pathlib
spec = importlib.util.spec_from_file_location("build", {build.__file__!r})
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)  # alone: the package would import torch
build.SOURCES = pathlib.Path({str(sources)!r})
print(build.build())
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    paths = {process.communicate()[0].strip() for process in processes}
    assert len(paths) == 1
    assert [str(path) for path in cache.iterdir()] == list(paths)


@pytest.mark.usefixtures("cache", "unchosen")
def test_no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert not kernels.native_available()
    assert "SLOWER" in kernels.describe()
    assert "install gcc" in kernels.describe()
    x, w = torch.randn(3, 8), torch.randn(4, 8)
    torch.testing.assert_close(kernels.linear(x, kernels.pack_weight(w)), x @ w.T)


@pytest.mark.usefixtures("unchosen")
def test_a_compiler_that_fails(cache, sources):
    (sources / "one.c").write_text("#error broken on purpose\n")
    assert "broken on purpose" in kernels.describe()
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("cache", "unchosen")
def test_native_demanded_but_not_there(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("KSANA_KERNELS", "native")
    with pytest.raises(RuntimeError, match="no-such-compiler"):
        kernels.native_available()


@pytest.mark.usefixtures("unchosen")
def test_reference_demanded(monkeypatch):
    monkeypatch.setenv("KSANA_KERNELS", "reference")
    assert not kernels.native_available()
    assert "KSANA_KERNELS=reference" in kernels.describe()


@pytest.mark.usefixtures("unchosen")
def test_unknown_choice(monkeypatch):
    monkeypatch.setenv("KSANA_KERNELS", "fast")
    with pytest.raises(RuntimeError, match="native or reference"):
        kernels.describe()


def test_describe_native(with_threads):
    with_threads(3)
    assert kernels.describe().startswith("native ")
    assert kernels.describe().endswith("3 threads")


@pytest.mark.parametrize("n", [0, -1, 257])
def test_threads_out_of_range(n):
    with pytest.raises(ValueError, match="from 1 to 256"):
        kernels.set_num_threads(n)


def test_several_callers_at_once(with_threads):
    """A second thread that finds the pool busy computes alone; everybody gets the right bits."""
    with_threads(2)
    x, w = torch.randn(30, 300), kernels.pack_weight(torch.randn(500, 300))
    expected = kernels.linear(x, w)
    right: list[bool] = []

    def call() -> None:
        right.extend(torch.equal(kernels.linear(x, w), expected) for _ in range(100))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert right == [True] * 300


def test_pool_survives_idling_and_resizing(with_threads):
    x, w = torch.randn(30, 300), kernels.pack_weight(torch.randn(500, 300))
    expected = kernels.linear(x, w)
    pause = threading.Event()
    for n in (1, 4, 2, 3):
        with_threads(n)
        for _ in range(20):
            assert torch.equal(kernels.linear(x, w), expected)
        pause.wait(0.002)  # long enough for the workers to fall asleep
        assert torch.equal(kernels.linear(x, w), expected)


def test_a_forked_child_computes_alone(with_threads):
    with_threads(2)
    x, w = torch.randn(30, 300), kernels.pack_weight(torch.randn(500, 300))
    expected = kernels.linear(x, w)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(kernels.linear(x, w), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_default_threads_are_physical_cores_within_the_quota(tmp_path, monkeypatch):
    for cpu in range(4):
        directory = tmp_path / f"cpu{cpu}" / "topology"
        directory.mkdir(parents=True)
        (directory / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    monkeypatch.setattr(threads, "CPUS", tmp_path)
    monkeypatch.setattr(threads, "CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert threads.default_num_threads() == 2
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert threads.default_num_threads() == 2
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert threads.default_num_threads() == 1
