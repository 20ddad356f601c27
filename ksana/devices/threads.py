"""How many threads to compute with."""

from __future__ import annotations

import os
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def default_num_threads() -> int:
    """The physical cores this process may run on, not more than its container's share of CPU time.

    Two hyperthreads of a core share its arithmetic units, so a thread for each would only contend.
    """
    cpus = os.sched_getaffinity(0)
    cores = {_siblings(cpu) for cpu in cpus}
    return max(1, min(len(cores), _quota_cpus(_read(_CGROUP_QUOTA)) or len(cores)))


def _siblings(cpu: int) -> str:
    """Names the core a logical CPU belongs to; where the kernel does not say, each is its own."""
    return _read(_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list") or f"cpu {cpu}"


def _quota_cpus(cpu_max: str) -> int | None:
    """Whole CPUs of a cgroup's `cpu.max`, "quota period" in microseconds or "max period"."""
    quota, _, period = cpu_max.partition(" ")
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return max(1, int(quota) // int(period))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
