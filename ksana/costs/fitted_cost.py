"""A step's time as a sum of measured terms: so much per step, per token, per pair attended, and so on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from ksana.costs.extrapolation import Extrapolation
from ksana.costs.step_cost import StepShape

Quantity = Literal["tokens", "samples", "prefill_pairs", "prefill_kv", "decode_kv"]
"""What a step has more or less of; see `StepShape`."""

QUANTITIES: dict[Quantity, Callable[[StepShape], int]] = {
    "tokens": lambda shape: shape.num_tokens,
    "samples": lambda shape: shape.num_samples,
    "prefill_pairs": lambda shape: shape.prefill_pairs,
    "prefill_kv": lambda shape: shape.prefill_kv,
    "decode_kv": lambda shape: shape.decode_kv,
}

Form = Literal["all", "up_to", "over"]


class Term(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds per unit of a quantity: of all of it, of its first `knot` units, or of what is over `knot`.

    With the last two, time can grow faster or slower from some size on, where kernels do.
    """

    quantity: Quantity
    form: Form = "all"
    knot: int = 0
    seconds: float = 0.0

    def units(self, shape: StepShape) -> int:
        amount = QUANTITIES[self.quantity](shape)
        if self.form == "all":
            return amount
        return min(amount, self.knot) if self.form == "up_to" else max(0, amount - self.knot)


class FittedTerms(msgspec.Struct, frozen=True, kw_only=True, tag="fitted", forbid_unknown_fields=True):
    """A constant and terms, all at least 0, and the most of each quantity that was measured.

    Having less of something than the least that was measured is no extrapolation: no term is negative, so the
    time lies between the constant and what was measured.
    """

    constant_s: float
    terms: tuple[Term, ...]
    most: dict[Quantity, int]


class FittedCost:
    """Cost: about 1 µs per term."""

    def __init__(self, fitted: FittedTerms, allow_extrapolation: bool = False) -> None:
        self.fitted = fitted
        self.extrapolation = Extrapolation(allow_extrapolation)
        self._terms = [(term.units, term.seconds) for term in fitted.terms if term.seconds]
        self._bounds = [(name, QUANTITIES[name], most) for name, most in fitted.most.items()]

    def seconds(self, shape: StepShape) -> float:
        """Raises ExtrapolationError for more of a quantity than was measured, unless that is allowed."""
        for name, amount, most in self._bounds:
            if amount(shape) > most:
                self.extrapolation.meet(name.replace("_", " "), amount(shape), 0, most)
                break
        seconds = self.fitted.constant_s
        for units, per_unit in self._terms:
            seconds += units(shape) * per_unit
        return seconds
