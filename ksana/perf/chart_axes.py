"""Axes of charts: where a value stands, and which round numbers are written beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence


class Axis:
    """Maps values to pixels; keeps `ticks` at round numbers."""

    def __init__(
        self,
        values: Sequence[float],
        is_log: bool,
        start: float,
        end: float,
        *,
        low: float | None = None,
        high: float | None = None,
    ) -> None:
        least, most = min(values, default=1.0), max(values, default=1.0)
        self.low = least if low is None else min(low, least)
        self.high = most if high is None else high
        self._is_log = is_log
        self._start, self._end = start, end
        if is_log:
            self.low, self.high = _decades(self.low, self.high)
            self.ticks = _log_ticks(self.low, self.high)
        else:
            largest = max(1.0, abs(self.low), abs(self.high))
            if self.high - self.low < 1e-9 * largest:
                self.high = self.low + largest
            step = _round_step((self.high - self.low) / 5)
            if high is None:
                self.high = step * math.ceil(self.high / step - 1e-9)
            first = math.ceil(self.low / step - 1e-9)
            self.ticks = [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def place(self, value: float) -> float:
        low, high = self.low, self.high
        if self._is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        share = (value - low) / (high - low)
        return self._start + (self._end - self._start) * min(1.0, max(0.0, share))


def _round_step(step: float) -> float:
    magnitude: float = 10.0 ** math.floor(math.log10(step))
    for nice in (1.0, 2.0, 2.5, 5.0):
        if nice * magnitude >= step * 0.999:
            return nice * magnitude
    return 10.0 * magnitude


def _decades(low: float, high: float) -> tuple[float, float]:
    """A little room at both ends, and one decade at least."""
    if high < low * 10:
        middle = math.sqrt(low * high)
        low, high = min(low, middle / math.sqrt(10)), max(high, middle * math.sqrt(10))
    return low, high


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 4 else (1,)
    ticks = [factor * 10.0**k for k in range(first, last + 1) for factor in factors]
    return [tick for tick in ticks if low <= tick <= high]


def short(value: float) -> str:
    """A number in at most six characters or so."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.4g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.4g}k"
    return f"{value:.4g}"
