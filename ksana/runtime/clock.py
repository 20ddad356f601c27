"""Time as actors see it: seconds, monotonic, from whatever clock trio runs on (real or virtual)."""

from __future__ import annotations

import trio


def now_s() -> float:
    """The current time of the running trio clock, in seconds. Only shells call this; cores are told."""
    return trio.current_time()
