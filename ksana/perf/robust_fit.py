"""Step times are noisy, some far off: a fit that leans neither below nor above, whatever a few say."""

from __future__ import annotations

import numpy as np

from ksana.perf.nonnegative_fit import Array, fit_nonnegative

_NUM_ITERATIONS = 6
_LARGE = 0.1
"""A logarithm of predicted over measured; beyond it a measurement counts by its error, not by its square."""
_LEAST_SHARE = 1e-3
"""Of the measured: what a prediction counts as at least, when errors are weighed."""


def fit_evenly(units: Array, seconds: Array, start: Array) -> Array:
    """Coefficients x >= 0, [n], for units @ x near to seconds; units [m, n], seconds [m] > 0, start [n].

    Least squares of relative errors lean below the truth, since a prediction of half costs 1/4 and one of
    twice the time 1: by 5 % where times scatter by 20 %. So errors are taken relative to the geometric mean
    of predicted and measured, as logarithms of their ratio (Huber's loss of these): twice weighs as much as
    half. Solved by weighing again and again.
    """
    solution = start
    for _ in range(_NUM_ITERATIONS):
        predicted = np.maximum(units @ solution, _LEAST_SHARE * seconds)
        between = np.sqrt(predicted * seconds)
        errors = np.abs(predicted - seconds) / between
        weights = np.sqrt(_LARGE / np.maximum(errors, _LARGE)) / between
        solution = fit_nonnegative(units * weights[:, None], seconds * weights)
    return solution
