"""Many small random worlds, each with random faults; what fails is printed so that `run` takes it."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from types import FrameType

import msgspec

from ksana.errors import ConfigError
from simulations.checks.promises import BrokenPromise
from simulations.keep import Keep
from simulations.scenario import Scenario
from simulations.swarm.swarm_draw import draw_scenario
from simulations.world import run_world

REAL_S_PER_WORLD = 60.0
"""A guard against loops that never end: a world takes a fraction of a second, however slow the machine."""

_KEEP = Keep(check_cache=True)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong in a world. `checker`: who noticed."""

    checker: str
    error: str


class SwarmFailure(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    failure: Failure
    scenario: Scenario


class Endless(Exception):
    """A world took so much real time that something in it loops."""


def try_scenario(scenario: Scenario, real_s: float = REAL_S_PER_WORLD) -> Failure | None:
    """Run it; None if every promise was kept. Raises ConfigError for an impossible scenario."""
    try:
        with _guard(real_s):
            run_world(scenario.world, scenario.open_workload(scenario.seed), seed=scenario.seed, keep=_KEEP)
    except ConfigError:
        raise
    except Exception as error:
        return Failure(checker=_noticed_by(error), error=f"{type(error).__name__}: {error}"[:2000])
    return None


def _noticed_by(error: BaseException) -> str:
    """The module that raised, which for a promise is that of its checker."""
    if isinstance(error, Endless):
        return "guard against endless loops"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return type(error).__name__
    path = frames[-1].filename.replace("\\", "/").removesuffix(".py").split("/")
    where = ".".join(path[-2:]) if isinstance(error, BrokenPromise) else ".".join(path[-3:])
    return f"{where}:{frames[-1].name}"


@contextmanager
def _guard(real_s: float) -> Iterator[None]:
    """Raise Endless in whatever runs, after so much real time, and again as long as something does. Only in
    the main thread of a process."""

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise Endless(f"not over after {real_s:.0f} s of real time")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, real_s, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def try_seed(seed: int, real_s: float = REAL_S_PER_WORLD) -> Failure | None:
    return try_scenario(draw_scenario(seed), real_s)


def run_swarm(
    seeds: range,
    *,
    jobs: int = 1,
    real_s: float = REAL_S_PER_WORLD,
    progress: Callable[[int], None] | None = None,
) -> SwarmFailure | None:
    """Try the seeds in order; the first that fails, not shrunk, or None. `progress` hears of each that did
    not."""
    for seed, failure in _results(seeds, jobs, real_s):
        if failure is not None:
            return SwarmFailure(seed=seed, failure=failure, scenario=draw_scenario(seed))
        if progress is not None:
            progress(seed)
    return None


def _results(seeds: range, jobs: int, real_s: float) -> Iterator[tuple[int, Failure | None]]:
    if jobs <= 1:
        for seed in seeds:
            yield seed, try_seed(seed, real_s)
        return
    with ProcessPoolExecutor(jobs) as pool:
        try:
            yield from zip(seeds, pool.map(try_seed, seeds, repeat(real_s), chunksize=4), strict=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
