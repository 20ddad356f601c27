"""What memory there is, on made-up machines: without containers, and with both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from ksana.host_memory import available_memory_bytes

MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """With 64 MiB to be had."""
    write(tmp_path, {"proc/meminfo": "MemTotal:  999999 kB\nMemFree: 1 kB\nMemAvailable:   65536 kB\n"})
    return tmp_path


def group_v2(root: Path, path: str, limit: str, used: int, cached: int = 0) -> None:
    base = f"sys/fs/cgroup{path}"
    stat = f"anon 5\ninactive_file {cached}\nactive_file 7\n"
    write(root, {f"{base}/memory.max": f"{limit}\n", f"{base}/memory.current": f"{used}\n"})
    write(root, {f"{base}/memory.stat": stat})


def group_v1(root: Path, path: str, limit: int, used: int, cached: int = 0) -> None:
    base = f"sys/fs/cgroup/memory{path}"
    stat = f"inactive_file 1\ntotal_inactive_file {cached}\n"
    write(root, {f"{base}/memory.limit_in_bytes": f"{limit}\n", f"{base}/memory.usage_in_bytes": f"{used}\n"})
    write(root, {f"{base}/memory.stat": stat})


def test_no_groups(machine: Path) -> None:
    assert available_memory_bytes(machine) == 64 * MIB
    write(machine, {"proc/self/cgroup": "0::/user.slice\n"})
    assert available_memory_bytes(machine) == 64 * MIB


def test_this_machine() -> None:
    available = available_memory_bytes()
    assert available is not None
    assert 0 < available < 1 << 50


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path) is None
    write(tmp_path, {"proc/meminfo": "MemTotal: 5 kB\n"})
    assert available_memory_bytes(tmp_path) is None


def test_version_2(machine: Path) -> None:
    write(machine, {"proc/self/cgroup": "0::/\n"})  # as a container sees its own group
    group_v2(machine, "", str(32 * MIB), used=20 * MIB, cached=4 * MIB)
    assert available_memory_bytes(machine) == 16 * MIB
    group_v2(machine, "", "max", used=20 * MIB)
    assert available_memory_bytes(machine) == 64 * MIB
    group_v2(machine, "", str(500 * MIB), used=0)
    assert available_memory_bytes(machine) == 64 * MIB
    group_v2(machine, "", str(32 * MIB), used=33 * MIB)  # lowered while in use
    assert available_memory_bytes(machine) == 0


def test_the_tightest_group_on_the_way_up_counts(machine: Path) -> None:
    write(machine, {"proc/self/cgroup": "0::/a/b/c\n"})
    group_v2(machine, "/a", str(20 * MIB), used=10 * MIB)
    group_v2(machine, "/a/b", "max", used=0)
    group_v2(machine, "/a/b/c", str(30 * MIB), used=0)
    group_v2(machine, "/other", str(MIB), used=0)
    assert available_memory_bytes(machine) == 10 * MIB


@pytest.mark.parametrize("path", ["/docker/5f3a", "/../../outside"])
def test_a_path_that_only_the_machine_outside_knows(machine: Path, path: str) -> None:
    write(machine, {"proc/self/cgroup": f"0::{path}\n"})
    group_v2(machine, "", str(8 * MIB), used=0)
    assert available_memory_bytes(machine) == 8 * MIB


def test_version_1(machine: Path) -> None:
    lines = "9:name=systemd:/\n5:cpu,cpuacct:/x\n4:hugetlb,memory:/docker/5f3a\n0::/\n"
    write(machine, {"proc/self/cgroup": lines})
    group_v1(machine, "", 9223372036854771712, used=90 * MIB)  # no limit
    assert available_memory_bytes(machine) == 64 * MIB
    group_v1(machine, "/docker/5f3a", 16 * MIB, used=10 * MIB, cached=MIB)
    assert available_memory_bytes(machine) == 7 * MIB


@pytest.mark.parametrize(("missing", "left"), [("memory.current", 3 * MIB), ("memory.stat", MIB)])
def test_a_limit_without_the_rest_still_is_one(machine: Path, missing: str, left: int) -> None:
    write(machine, {"proc/self/cgroup": "0::/\n"})
    group_v2(machine, "", str(2 * MIB), used=MIB, cached=MIB)
    (machine / "sys/fs/cgroup" / missing).unlink()
    assert available_memory_bytes(machine) == left
