"""What attention takes on top when decodes have KV of unequal lengths.

Rows that go on when the others are done leave most of the device idle: the last few take longer than their
share of the work. Measured are batches of n decodes of which m are longer than the rest: how much longer they
take per token of KV that those have more, beyond what n decodes of the mean length take. A batch of any
lengths is layers of such differences, one from each length to the next longer one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import mul

import msgspec


class SkewRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Microseconds of one layer per token of KV, for some n and, for each of them, some m < n; all ascend."""

    decodes: tuple[int, ...]
    longer: tuple[tuple[int, ...], ...]
    us_per_token: tuple[tuple[float, ...], ...]


class SkewTable:
    """Cost: about 0.1 µs per decode."""

    def __init__(self, rates: SkewRates) -> None:
        self.rates = rates
        self._weights: dict[int, tuple[float, ...]] = {}

    def microseconds(self, lengths: Sequence[int]) -> float:
        """Of one layer, for decodes with so many tokens of KV each."""
        num = len(lengths)
        if num < 2 or not self.rates.decodes:
            return 0.0
        weights = self._weights.get(num)
        if weights is None:
            weights = self._weights[num] = self._of_sorted(num)
        total: float = sum(map(mul, weights, sorted(lengths, reverse=True)))
        return total

    def _of_sorted(self, num: int) -> tuple[float, ...]:
        """By length, longest first: what each token of KV adds. (The sum over m of rate(m) times how much
        longer the m-th longest is than the next, written as a sum over lengths. The rate of all n is 0.)"""
        rates = [self.rate(num, longer) for longer in range(1, num)]
        return tuple(after - before for before, after in zip([0.0, *rates], [*rates, 0.0], strict=True))

    def rate(self, num: int, longer: int) -> float:
        """For `longer` < `num`, both at least 1; linear between the measured ones. Above the largest batch
        that was measured its rates hold, and below the smallest one's."""
        decodes = self.rates.decodes
        above = min(bisect_left(decodes, num), len(decodes) - 1)
        below = max(0, above - 1) if decodes[above] > num else above
        upper = self._at(above, longer)
        if below == above:
            return upper
        lower = self._at(below, longer)
        return lower + (upper - lower) * (num - decodes[below]) / (decodes[above] - decodes[below])

    def _at(self, index: int, longer: int) -> float:
        """In the measured batch of that index: linear in m, and 0 when all are equally long."""
        points = (*self.rates.longer[index], self.rates.decodes[index])
        values = (*self.rates.us_per_token[index], 0.0)
        if longer <= points[0]:
            return values[0]
        if longer >= points[-1]:
            return 0.0
        above = bisect_left(points, longer)
        share = (longer - points[above - 1]) / (points[above] - points[above - 1])
        return values[above - 1] + share * (values[above] - values[above - 1])
