"""Unions of grids: what is linear comes out exact, what was measured stays, what no cell holds is missing."""

from __future__ import annotations

import itertools
import random

import pytest

from ksana.errors import ConfigError
from ksana.perf import grid_union
from ksana.perf.grid_union import GridUnion, Point, complete_grids

SLOPES = (3.0, 0.5, 7.0, 0.25)


def linear(point: Point) -> float:
    """A sum of terms, and of a product of all axes: linear in each of them."""
    product = 1.0
    for value in point:
        product *= value
    return 5.0 + sum(slope * value for slope, value in zip(SLOPES, point, strict=False)) + 1e-6 * product


def grid(rng: random.Random, num_axes: int) -> list[Point]:
    axes = [sorted({0, 512, *rng.sample(range(1, 512), rng.randint(1, 4))}) for _ in range(num_axes)]
    return list(itertools.product(*axes))


@pytest.mark.parametrize("seed", range(12))
def test_what_is_linear_is_exact_on_any_union(seed: int) -> None:
    rng = random.Random(seed)
    num_axes, num_grids = rng.randint(1, 4), rng.randint(1, 3)
    points = [point for _ in range(num_grids) for point in grid(rng, num_axes)]
    rng.shuffle(points)
    union = GridUnion({point: linear(point) for point in points})
    for _ in range(50):
        point = tuple(rng.randint(0, 512) for _ in range(num_axes))
        assert union.at(point) == pytest.approx(linear(point), rel=1e-9)


def test_the_smallest_cell_around_counts_and_measured_points_stay() -> None:
    coarse = dict.fromkeys(itertools.product((0, 100), (0, 100)), 10.0)
    fine = dict.fromkeys(itertools.product((10, 15, 20), (10, 15, 20)), 2.0)
    union = GridUnion({**coarse, **fine})
    assert union.at((15, 15)) == 2.0
    assert union.at((12, 18)) == 2.0
    assert union.at((100, 0)) == 10.0
    assert union.at((60, 60)) == 10.0


def test_grids_are_found_whatever_their_overlap() -> None:
    one = ((0, 8, 64), (1, 2, 4))
    other = ((0, 12, 64), (1, 3, 4))
    points = [*itertools.product(*one), *itertools.product(*other)]
    found = complete_grids(points)
    assert one in found
    assert other in found
    assert ((0, 64), (1, 2, 3, 4)) in found  # of both


def test_a_hole_is_filled_from_its_neighbours_and_beyond_the_end_nothing_is() -> None:
    points = {(a, b): linear((a, b)) for a, b in itertools.product((0, 1, 2, 4), (0, 1, 2, 4))}
    del points[2, 2]
    del points[4, 4]
    union = GridUnion(points)
    assert union.at((2, 2)) == pytest.approx(linear((2, 2)))
    assert union.at((4, 4)) is None
    assert union.at((5, 0)) is None
    assert GridUnion({}).at((1,)) is None


def test_points_in_no_order_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_union, "_MAX_GRIDS", 10)
    rng = random.Random(2)
    points = {tuple(rng.randrange(100) for _ in range(3)): 1.0 for _ in range(200)}
    with pytest.raises(ConfigError, match="more than 10 different grids"):
        GridUnion(points)


def test_what_only_one_grid_has_is_told_by_the_others() -> None:
    coarse = {point: linear(point) for point in itertools.product((0, 8, 64), (1, 2, 4))}
    fine = {point: linear(point) for point in itertools.product((0, 12, 20, 64), (1, 3, 4))}
    assert list(GridUnion(coarse).from_others()) == []
    pairs = list(GridUnion({**coarse, **fine}).from_others())
    assert len(pairs) == 3 + 6  # (8, ...), and (12, ...) and (20, ...)
    for predicted, measured in pairs:
        assert predicted == pytest.approx(measured)
    off = {**coarse, **fine, (12, 3): 2 * linear((12, 3))}
    worst = max(abs(predicted / measured - 1) for predicted, measured in GridUnion(off).from_others())
    assert worst == pytest.approx(0.5)
