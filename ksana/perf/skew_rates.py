"""Reads `skew.csv`: attention of n decodes, nb of them with more KV than the rest, alone or beside a prefill.

Columns: n, nb, pc and kp (the prefill and what is before it; 0: none), kvs and kv_big (KV lengths), t_mean_us
(the same with all decodes at the mean length), t_skew_us.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ksana.costs.attention_table import AttentionTable
from ksana.costs.skew_table import SkewRates
from ksana.costs.step_cost import StepShape
from ksana.perf.csv_numbers import read_rows

_COLUMNS = ("n", "nb", "pc", "kp", "kvs", "kv_big", "t_mean_us", "t_skew_us")


class SkewRow(msgspec.Struct, frozen=True):
    num: int
    num_longer: int
    tokens: int
    before: int
    kv: int
    longer_kv: int
    equal_us: float
    skewed_us: float

    def shape(self, *, equal: bool) -> StepShape:
        """The step that was measured, or the one with all decodes at the mean length."""
        lengths = [self.longer_kv] * self.num_longer + [self.kv] * (self.num - self.num_longer)
        if equal:
            lengths = [round(sum(lengths) / self.num)] * self.num
        return StepShape(
            num_tokens=self.tokens + self.num,
            num_rows=self.num + bool(self.tokens),
            num_samples=self.num,
            prefills=((self.tokens, self.before),) if self.tokens else (),
            num_decodes=self.num,
            decode_kv=sum(lengths),
            max_decode_kv=max(lengths),
            decode_lengths=tuple(lengths),
        )


def read_skew(path: Path) -> list[SkewRow]:
    """Rows that tell nothing (equal lengths, no times) are left out. Raises ConfigError."""
    rows = [SkewRow(*map(int, row[:6]), *row[6:]) for row in read_rows(path, _COLUMNS)]
    return [
        row
        for row in rows
        if 0 < row.num_longer < row.num <= 4096 and row.longer_kv > row.kv and row.equal_us and row.skewed_us
    ]


def scale_of(rows: Sequence[SkewRow], table: AttentionTable) -> float:
    """How many times the times of the table these are: the file may hold sums over several runs. Batches of
    equal lengths are in both."""
    return statistics.median([row.equal_us / table.microseconds(row.shape(equal=True)) for row in rows])


def rates_of(rows: Sequence[SkewRow], scale: float) -> tuple[SkewRates, SkewRates]:
    """For steps of decodes alone, and for decodes beside a prefill: medians over what was measured. `scale`:
    see `scale_of`."""
    alone = [row for row in rows if not row.tokens]
    beside = [row for row in rows if row.tokens]
    return _rates(alone, scale), _rates(beside or alone, scale)


def _rates(rows: Sequence[SkewRow], scale: float) -> SkewRates:
    found: dict[int, dict[int, list[float]]] = {}
    for row in rows:
        rate = (row.skewed_us - row.equal_us) / scale / (row.longer_kv - row.kv)
        found.setdefault(row.num, {}).setdefault(row.num_longer, []).append(rate)
    decodes = sorted(found)
    return SkewRates(
        decodes=tuple(decodes),
        longer=tuple(tuple(sorted(found[num])) for num in decodes),
        us_per_token=tuple(
            tuple(statistics.median(found[num][longer]) for longer in sorted(found[num])) for num in decodes
        ),
    )


def halves(rows: Sequence[SkewRow]) -> Iterator[tuple[list[SkewRow], list[SkewRow]]]:
    """(to learn from, to check with), twice: two rows here, the next two there, and so on."""
    parts: tuple[list[SkewRow], list[SkewRow]] = ([], [])
    for index, row in enumerate(rows):
        parts[index // 2 % 2].append(row)
    yield parts
    yield parts[1], parts[0]
