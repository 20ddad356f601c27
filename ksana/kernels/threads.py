"""How many threads are useful here: one per physical core that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def default_num_threads() -> int:
    """Physical cores among the allowed CPUs, at most the container's CPU quota, from 1 to 64."""
    allowed = (
        sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]
    )
    cores = {_core_of(cpu) for cpu in allowed}
    return max(1, min(len(cores), _quota(), 64))


def _core_of(cpu: int) -> str:
    """What hyper-threads of one core have in common: the list of them."""
    try:
        return (CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota() -> int:
    """CPUs' worth of time the control group may use, rounded up; a large number without a limit."""
    try:
        quota, period = CPU_QUOTA.read_text().split()
        return 1024 if quota == "max" else max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return 1024
