"""The guard of every cost that was measured: it does not go beyond what was measured without saying so."""

from __future__ import annotations

from ksana.errors import KsanaError


class ExtrapolationError(KsanaError):
    """A step whose shape is outside of what a cost model was made from."""


class Extrapolation:
    """Whether shapes outside the measured range are allowed, and how many there were."""

    def __init__(self, allowed: bool = False) -> None:
        self.allowed = allowed
        self.num = 0

    def meet(self, what: str, value: float, least: float, most: float) -> None:
        """Called for a shape outside [least, most]. Raises ExtrapolationError unless that is allowed."""
        if not self.allowed:
            raise ExtrapolationError(
                f"a step with {what} {value:g} is outside of what the cost model was made from, "
                f"{least:g} to {most:g}; measure such steps, or allow extrapolation"
            )
        self.num += 1
