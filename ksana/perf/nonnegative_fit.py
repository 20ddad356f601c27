"""Least squares with coefficients that may not be negative."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_TOLERANCE = 1e-9


def fit_nonnegative(features: Array, target: Array) -> Array:
    """The x >= 0, [n], that makes the length of features @ x - target least; features [m, n], target [m].

    The active-set method of Lawson and Hanson (Solving Least Squares Problems, chapter 23). Columns are
    scaled to length 1 first: their units differ by many orders of magnitude.
    """
    scale = np.linalg.norm(features, axis=0)
    scale[scale == 0] = 1.0
    matrix = features / scale
    num = matrix.shape[1]
    solution = np.zeros(num)
    is_free = np.zeros(num, dtype=bool)
    for _ in range(3 * num):
        gradient = matrix.T @ (target - matrix @ solution)
        gradient[is_free] = -np.inf
        best = int(np.argmax(gradient)) if num else 0
        if is_free.all() or gradient[best] <= _TOLERANCE * float(np.linalg.norm(target)):
            break
        is_free[best] = True
        solution = _step_inside(matrix, target, solution, is_free)
    result: Array = solution / scale
    return result


def _step_inside(matrix: Array, target: Array, solution: Array, is_free: NDArray[np.bool_]) -> Array:
    """Solve for the free ones; whoever would become negative is fixed at 0 on the way there."""
    while True:
        wanted = np.zeros_like(solution)
        wanted[is_free] = np.linalg.lstsq(matrix[:, is_free], target, rcond=None)[0]
        negative = is_free & (wanted <= 0)
        if not negative.any():
            return wanted
        way = solution[negative] / (solution[negative] - wanted[negative] + 1e-300)
        solution = solution + float(way.min()) * (wanted - solution)
        is_free &= solution > _TOLERANCE * max(1e-300, float(np.abs(solution).max()))
        solution[~is_free] = 0.0
