"""How much memory this process may still take: of the machine, and of the container it may be in. Linux.

A container's limit is that of its control group (cgroup), and of the groups around it; /proc/meminfo knows
nothing of it. Who takes more than the limit is killed without a word, however much the machine has left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_FILES = {
    "memory.max": ("memory.current", "inactive_file"),
    "memory.limit_in_bytes": ("memory.usage_in_bytes", "total_inactive_file"),
}
"""By the file of the limit (version 2 and 1 of cgroups): that of the use, and the key in memory.stat of
what was cached of files and is given up first when memory is short."""


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Memory that could be had now without swapping: the least of MemAvailable and what limits leave.

    None where the system does not tell. `root` holds proc and sys.
    """
    kilobytes = _number(r"^MemAvailable:\s+(\d+) kB$", root / "proc/meminfo")
    if kilobytes is None:
        return None
    return min([kilobytes * 1024, *(_left_in(file) for file in _limit_files(root))])


def _limit_files(root: Path) -> Iterator[Path]:
    """The limit files of this process's control groups for memory, innermost first.

    In a container the groups above its own are usually not to be seen, and sometimes its own stands at the
    top while /proc names its path outside; so all that there are on the way up count.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:  # number:controllers:path; version 2 has number 0 and no controllers
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mount, limit = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, limit = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
        for depth in range(len(parts), -1, -1):
            group = mount.joinpath(*parts[:depth])
            if (group / limit).is_file():
                yield group / limit


def _left_in(limit_file: Path) -> int:
    """Bytes that the group may still take; a very large number if it has no limit."""
    use_file, stat_key = _FILES[limit_file.name]
    limit = _number(r"^(\d+)$", limit_file)
    if limit is None:  # "max"
        return 1 << 63
    used = _number(r"^(\d+)$", limit_file.with_name(use_file)) or 0
    cached = _number(rf"^{stat_key} (\d+)$", limit_file.with_name("memory.stat")) or 0
    return max(0, limit - used + cached)


def _number(pattern: str, file: Path) -> int | None:
    """The number in a line of the file; None if it is not there or cannot be read."""
    try:
        match = re.search(pattern, file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None
