"""One layer's attention of decodes alone, from a grid of equal lengths and what is known of its blocks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from ksana.costs.attention_table import AttentionGrid
from ksana.costs.extrapolation import Extrapolation
from ksana.costs.row_blocks import RowBlocks, Tails, equal_tail_us
from ksana.costs.skew_table import SkewTable
from ksana.costs.step_cost import StepShape

_Line = tuple[int, tuple[float, ...]]


class DecodeAttention:
    """Batches that are split and such that are not are two different kernels, so neither is interpolated with
    the other. Of the latter the tail is taken off the measured times first, and added for the lengths at
    hand: between two measured numbers of rows the last round of blocks is anything from empty to full."""

    def __init__(
        self,
        grid: AttentionGrid,
        blocks: RowBlocks,
        split_skew: SkewTable | None,
        padded: Callable[[int], int],
        extrapolation: Extrapolation,
    ) -> None:
        self._kv = grid.decode_kv
        self._most = grid.decodes[-1]
        self._blocks = blocks
        self._tails = Tails(blocks)
        self._split_skew = split_skew
        self._padded = padded
        self._extrapolation = extrapolation
        lines = list(zip(grid.decodes, grid.decode_us, strict=True))
        self._split = [line for line in lines if blocks.are_split(line[0])] or lines[:1]
        self._whole = [self._without_tail(line) for line in lines if not blocks.are_split(line[0])]
        if not self._whole:
            self._whole = [self._without_tail(lines[-1])]

    def _without_tail(self, line: _Line) -> _Line:
        num, times = line
        return num, tuple(
            max(0.0, us - equal_tail_us(self._blocks, num, kv))
            for us, kv in zip(times, self._kv, strict=True)
        )

    def microseconds(self, shape: StepShape) -> float:
        """The kernel is chosen by the number of rows it was captured for, padding included."""
        num = shape.num_decodes
        kv = shape.decode_kv / num
        if num > self._most:
            self._extrapolation.meet("decodes", num, 1, self._most)
        if kv > self._kv[-1]:
            self._extrapolation.meet("KV tokens per decode", kv, self._kv[0], self._kv[-1])
        if self._blocks.are_split(self._padded(num)):
            us = self._between(self._split, num, kv)
            if self._split_skew is not None and shape.decode_lengths:
                us += self._split_skew.microseconds(shape.decode_lengths)
            return max(0.0, us)
        us = self._between(self._whole, num, kv)
        if shape.decode_lengths:
            return us + self._tails.microseconds(shape.decode_lengths)
        return us + equal_tail_us(self._blocks, num, kv)

    def _between(self, lines: Sequence[_Line], num: int, kv: float) -> float:
        """Linear in both; beyond the first and last line on the straight through the two next to it."""
        column = min(bisect_right(self._kv, kv) - 1, len(self._kv) - 2)
        at = 0.0
        if column < 0:
            column = 0
        else:
            at = (kv - self._kv[column]) / (self._kv[column + 1] - self._kv[column])

        def of_line(times: tuple[float, ...]) -> float:
            return times[column] + at * (times[column + 1] - times[column])

        if len(lines) == 1:
            return of_line(lines[0][1]) * num / lines[0][0]
        above = min(max(bisect_left(lines, num, key=lambda line: line[0]), 1), len(lines) - 1)
        (fewer, lower), (more, upper) = lines[above - 1], lines[above]
        low, high = of_line(lower), of_line(upper)
        return max(0.0, low + (high - low) * (num - fewer) / (more - fewer))
