"""Finds the highest rate at which something still holds, from as few trials as possible."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ksana.errors import ConfigError

_MAX_STEPS = 40


class Bracket(msgspec.Struct, frozen=True, kw_only=True):
    """It holds at `holds` and no longer at `breaks`. None: it did nowhere, or everywhere, that was tried."""

    holds: float | None
    breaks: float | None


def search_rate(
    does_hold: Callable[[float], bool], start: float, *, first_factor: float = 2.0, tolerance: float = 0.02
) -> Bracket:
    """Bracket the border from `start` on by `first_factor`, then larger ones; then bisect
    (geometrically) until both ends are within `tolerance`. What holds at a rate is taken to hold below it.

    Gives up after 40 factors either way. Raises ConfigError for a factor or tolerance that leads nowhere.
    """
    if not (start > 0 and first_factor > 1 and tolerance > 1e-6):
        raise ConfigError(f"cannot search from {start:g} by {first_factor:g} to within {tolerance:g}")
    bracket = _bracket(does_hold, start, first_factor)
    holds, breaks = bracket.holds, bracket.breaks
    if holds is None or breaks is None:
        return bracket
    while breaks > holds * (1 + tolerance):
        middle = (holds * breaks) ** 0.5
        if does_hold(middle):
            holds = middle
        else:
            breaks = middle
    return Bracket(holds=holds, breaks=breaks)


def _bracket(does_hold: Callable[[float], bool], start: float, first_factor: float) -> Bracket:
    rate, factor = start, first_factor
    if does_hold(rate):
        for _ in range(_MAX_STEPS):
            if not does_hold(rate * factor):
                return Bracket(holds=rate, breaks=rate * factor)
            rate, factor = rate * factor, _larger(factor)
        return Bracket(holds=rate, breaks=None)
    for _ in range(_MAX_STEPS):
        if does_hold(rate / factor):
            return Bracket(holds=rate / factor, breaks=rate)
        rate, factor = rate / factor, _larger(factor)
    return Bracket(holds=None, breaks=rate)


def _larger(factor: float) -> float:
    """The closer the first look, the closer the ones after it; soon by 2."""
    return max(factor, min(factor**2, 2.0))
