"""How long made-up prompts and answers are."""

from __future__ import annotations

import math
import random

import msgspec

from ksana.errors import ConfigError
from simulations.workloads.lines import MAX_TOKENS

FORMS = "`512`, `uniform:LOW:HIGH` or `lognormal:MEDIAN:SIGMA:MAX`"


class Lengths(msgspec.Struct, frozen=True):
    """A distribution over whole numbers from 1 to `high`."""

    low: int
    high: int
    median: float | None = None
    """With it the logarithm is normal, with `sigma`; without, all of low to high are equally likely."""
    sigma: float = 0.0

    def draw(self, rng: random.Random) -> int:
        if self.median is None:
            return rng.randint(self.low, self.high)
        return min(self.high, max(self.low, round(self.median * math.exp(rng.gauss(0.0, self.sigma)))))


def parse_lengths(text: str) -> Lengths:
    """Read one of FORMS. Raises ConfigError."""
    kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
    try:
        values = [float(number) for number in numbers]
        if kind == "fixed" and len(values) == 1:
            lengths = Lengths(int(values[0]), int(values[0]))
        elif kind == "uniform" and len(values) == 2:
            lengths = Lengths(int(values[0]), int(values[1]))
        elif kind == "lognormal" and len(values) == 3:
            lengths = Lengths(1, int(values[2]), values[0], values[1])
        else:
            raise ValueError
        if lengths.median is not None and not (lengths.median >= 1 and 0 <= lengths.sigma <= 10):
            raise ValueError
    except (ValueError, OverflowError):
        raise ConfigError(f"lengths are written as {FORMS}, not {text[:80]!r}") from None
    if not 1 <= lengths.low <= lengths.high <= MAX_TOKENS:
        raise ConfigError(f"lengths lie between 1 and {MAX_TOKENS:,}, low before high, not {text[:80]!r}")
    return lengths
