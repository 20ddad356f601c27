"""The exception of all checkers of the simulation."""

from __future__ import annotations

from ksana.errors import InvariantViolated


class BrokenPromise(InvariantViolated):
    """A checker of the simulation found what must never be."""


class NotOver(BrokenPromise):
    """Requests had not ended at `until_s`. That breaks a promise unless whoever set it wanted it short."""
