"""Time of one layer's attention in a step, from a measured grid.

Measured are: n decodes of equal KV length; one prefill (chunk, KV before it); and a prefill with n decodes.
Between grid points the time is interpolated on a linear scale, because attention is a constant plus work, and
the work (KV bytes read, pairs attended) is a product of the axes: exactly what multilinear interpolation
keeps. A prefill's work grows with the square of the chunk as well, so along that axis it is the time per
token, above that of the smallest chunk, that is interpolated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from ksana.costs.extrapolation import Extrapolation
from ksana.costs.step_cost import StepShape


class AttentionGrid(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured microseconds of one layer. Axes ascend strictly and have at least two points each.

    `decode_us[n][kv]`: only decodes. `prefill_us[chunk][before]`: one prefill, alone.
    `mixed_us[chunk][before][n][kv]`: one prefill and n decodes.
    """

    decodes: tuple[int, ...]
    decode_kv: tuple[int, ...]
    decode_us: tuple[tuple[float, ...], ...]
    chunks: tuple[int, ...]
    before: tuple[int, ...]
    prefill_us: tuple[tuple[float, ...], ...]
    mixed_decodes: tuple[int, ...]
    mixed_us: tuple[tuple[tuple[tuple[float, ...], ...], ...], ...]


class Axis:
    """One axis of a grid: finds the cell of a value and the place in it."""

    def __init__(self, what: str, points: Sequence[int], extrapolation: Extrapolation) -> None:
        self.what = what
        self.points = points
        self._extrapolation = extrapolation
        self._last_cell = len(points) - 2

    def locate(self, value: float) -> tuple[int, float]:
        """(i, w): the value is points[i] + w * (points[i + 1] - points[i]). Below the first point it takes
        that one's place: less work does not take less time than the least that was measured. Above the last
        one w > 1, if that is allowed."""
        points = self.points
        if value <= points[0]:
            return 0, 0.0
        if value > points[-1]:
            self._extrapolation.meet(self.what, value, points[0], points[-1])
        index = min(bisect_right(points, value) - 1, self._last_cell)
        return index, (value - points[index]) / (points[index + 1] - points[index])


class AttentionTable:
    """Interpolates in a grid. A decode-only step costs about 1 µs here, one with a prefill about 10."""

    def __init__(self, grid: AttentionGrid, extrapolation: Extrapolation) -> None:
        self.grid = grid
        self._decodes = Axis("decodes", grid.decodes, extrapolation)
        self._decode_kv = Axis("KV tokens per decode", grid.decode_kv, extrapolation)
        self._chunks = Axis("prefill tokens", grid.chunks, extrapolation)
        self._before = Axis("KV tokens before a prefill", grid.before, extrapolation)
        # No decodes is a place on this axis too: there, the time is that of the prefill alone.
        self._mixed_decodes = Axis("decodes beside a prefill", (0, *grid.mixed_decodes), extrapolation)
        num_kv = len(grid.decode_kv)
        self._mixed_us = tuple(
            tuple(((alone,) * num_kv, *rows) for alone, rows in zip(line, block, strict=True))
            for line, block in zip(grid.prefill_us, grid.mixed_us, strict=True)
        )

    def microseconds(self, shape: StepShape) -> float:
        """Of one layer, for all rows of a step.

        Several prefills: the costliest is taken together with the decodes; each other one adds what it takes
        alone above the smallest chunk, since the launch is shared and the work adds up.
        """
        num, kv = shape.num_decodes, shape.decode_kv / max(1, shape.num_decodes)
        if not shape.prefills:
            return self._of_decodes(num, kv) if num else 0.0
        first = shape.prefills[0]
        others = 0.0
        if len(shape.prefills) > 1:
            alone = [self.of_prefill(tokens, before) for tokens, before in shape.prefills]
            costliest = max(range(len(alone)), key=alone.__getitem__)
            first = shape.prefills[costliest]
            least = self.grid.prefill_us[0][0]
            others = sum([max(0.0, us - least) for index, us in enumerate(alone) if index != costliest])
        return self.of_mixed(*first, num, kv) + others

    def _of_decodes(self, num: int, kv: float) -> float:
        row, at_row = self._decodes.locate(num)
        column, at_column = self._decode_kv.locate(kv)
        return _bilinear(self.grid.decode_us, row, at_row, column, at_column)

    def of_prefill(self, tokens: int, before: int) -> float:
        """One prefill alone."""
        column, at = self._before.locate(before)
        us = self.grid.prefill_us

        def at_chunk(index: int) -> float:
            line = us[index]
            return line[column] + at * (line[column + 1] - line[column])

        chunk, at_chunk_axis = self._chunks.locate(tokens)
        least = at_chunk(0)
        return self._along_chunks(tokens, chunk, at_chunk_axis, least, at_chunk(chunk), at_chunk(chunk + 1))

    def of_mixed(self, tokens: int, before: int, num_decodes: int, kv: float) -> float:
        """One prefill, and decodes of that mean KV length."""
        if not num_decodes:
            return self.of_prefill(tokens, before)
        line, at_line = self._before.locate(before)
        row, at_row = self._mixed_decodes.locate(num_decodes)
        column, at_column = self._decode_kv.locate(kv)

        def at_chunk(index: int) -> float:
            block = self._mixed_us[index]
            lower = _bilinear(block[line], row, at_row, column, at_column)
            upper = _bilinear(block[line + 1], row, at_row, column, at_column)
            return lower + at_line * (upper - lower)

        chunk, at = self._chunks.locate(tokens)
        return self._along_chunks(tokens, chunk, at, at_chunk(0), at_chunk(chunk), at_chunk(chunk + 1))

    def _along_chunks(
        self, tokens: int, chunk: int, at: float, least: float, lower: float, upper: float
    ) -> float:
        """The time per token above the smallest chunk's is linear: work is a * tokens + b * tokens**2."""
        points = self.grid.chunks
        below = (lower - least) / points[chunk]
        above = (upper - least) / points[chunk + 1]
        return least + max(tokens, points[0]) * (below + at * (above - below))


def _bilinear(
    table: Sequence[Sequence[float]], row: int, at_row: float, column: int, at_column: float
) -> float:
    lower, upper = table[row], table[row + 1]
    left = lower[column] + at_column * (lower[column + 1] - lower[column])
    right = upper[column] + at_column * (upper[column + 1] - upper[column])
    return left + at_row * (right - left)
