"""The one place that makes trio run tasks in a repeatable order. It needs two private names of trio.

trio shuffles tasks that become runnable together, on purpose. For a simulation the shuffle is good (it
finds races), as long as the same seed gives the same order. tests/runtime/test_deterministic.py is the
canary: it fails when a new trio moves these names or uses its random numbers for something else.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import trio

Result = TypeVar("Result")


@contextmanager
def seeded_task_order(seed: int) -> Iterator[None]:
    """Within it, `trio.run` picks the order of runnable tasks from `seed` alone.

    Not for two threads at once: the state is trio's and global. Raises RuntimeError when this version of
    trio does not have the names.
    """
    import trio._core._run as trio_run

    if not isinstance(getattr(trio_run, "_r", None), random.Random) or not hasattr(
        trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING"
    ):
        raise RuntimeError(
            f"trio {trio.__version__} keeps its task order elsewhere: adapt ksana.runtime.deterministic"
        )
    names = vars(trio_run)
    saved = names["_r"], names["_ALLOW_DETERMINISTIC_SCHEDULING"]
    names["_r"], names["_ALLOW_DETERMINISTIC_SCHEDULING"] = random.Random(seed), True
    try:
        yield
    finally:
        names["_r"], names["_ALLOW_DETERMINISTIC_SCHEDULING"] = saved


def run_deterministic(
    seed: int, main: Callable[[], Awaitable[Result]], clock: trio.abc.Clock | None = None
) -> Result:
    """`trio.run(main)` with a repeatable order of tasks, usually on a `VirtualClock`."""
    with seeded_task_order(seed):
        return trio.run(main, clock=clock)
