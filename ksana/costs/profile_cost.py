"""A step's time from profile tables: what each kind of layer took, by the tokens or sequences in a step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import msgspec

from ksana.costs.attention_table import AttentionGrid, AttentionTable
from ksana.costs.communication import Communication, CommunicationCost
from ksana.costs.decode_attention import DecodeAttention
from ksana.costs.extrapolation import Extrapolation
from ksana.costs.launches import Launches
from ksana.costs.row_blocks import RowBlocks
from ksana.costs.skew_table import SkewRates, SkewTable
from ksana.costs.step_cost import StepShape


class LayerTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Microseconds of one kind of layer at some sizes (tokens in the step, or rows)."""

    name: str
    per_step: int
    """How many of it one step runs: once, or so many times in each decoder layer."""
    sizes: tuple[int, ...]
    us: tuple[float, ...]


class ProfileTables(msgspec.Struct, frozen=True, kw_only=True, tag="profile", forbid_unknown_fields=True):
    """The tables of one model on one device, and how the engine they speak for pads its steps."""

    num_layers: int
    dense: tuple[LayerTable, ...]
    """By tokens."""
    per_sequence: tuple[LayerTable, ...]
    """By rows: the engine of these tables computes logits for every row, also of an unfinished prompt."""
    attention: AttentionGrid
    skew_alone: SkewRates | None = None
    """Of attention, for steps of decodes alone; None: unequal KV lengths count as equal ones."""
    skew_beside_prefill: SkewRates | None = None
    blocks: RowBlocks | None = None
    """Of decodes alone. `skew_alone` is then of batches that are split into more blocks."""
    padded_sizes: tuple[int, ...] = ()
    """Steps of at most the last of these sizes, in tokens, are padded up to the next one: they run from
    captured CUDA graphs. Empty: no padding."""
    launches: Launches = Launches()
    communication: Communication | None = None
    """None: one device, or such as share nothing."""


class ProfileCost:
    """The sum over layers. About 5 µs for a step of decodes, 20 with a prefill among them.

    Between two measured sizes a layer takes the time of the larger one: a matrix product works in tiles, and
    a token more costs a whole tile. (Where a layer has no tiles, neighbouring sizes differ little.)
    """

    def __init__(self, tables: ProfileTables, allow_extrapolation: bool = False) -> None:
        """Raises ConfigError where nothing tells what devices that share a model tell each other."""
        self.tables = tables
        self.extrapolation = Extrapolation(allow_extrapolation)
        self._attention = AttentionTable(tables.attention, self.extrapolation)
        self._skew_alone, self._skew_beside_prefill = (
            SkewTable(rates) if rates is not None else None
            for rates in (tables.skew_alone, tables.skew_beside_prefill)
        )
        padded = self._padded = _padding(tables.padded_sizes)
        self._communication = (
            CommunicationCost(tables.communication) if tables.communication is not None else None
        )
        self._decodes: DecodeAttention | None = None
        if tables.blocks is not None:
            self._decodes = DecodeAttention(
                tables.attention, tables.blocks, self._skew_alone, padded, self.extrapolation
            )
        self._largest_graph = tables.padded_sizes[-1] if tables.padded_sizes else 0
        self._dense_s = _SizeTable("tokens", tables.dense, self.extrapolation, padded)
        self._rows_s = _SizeTable("rows", tables.per_sequence, self.extrapolation, lambda size: size)

    def seconds(self, shape: StepShape) -> float:
        """Raises ExtrapolationError outside the tables, unless that is allowed."""
        with_this_one = self.extrapolation.num + 1
        attention_us = self.attention_us(shape) * self.tables.num_layers
        kernels_s = self._dense_s.at(shape.num_tokens) + self._rows_s.at(shape.num_rows) + attention_us * 1e-6
        launches = self.tables.launches
        launched_us = launches.none_us
        if shape.num_tokens <= self._largest_graph:
            launched_us = launches.piecewise_us if shape.prefills else launches.full_us
        seconds = max(0.0, kernels_s + launched_us * 1e-6)
        if self._communication is not None:
            seconds += self._communication.seconds(self._padded(shape.num_tokens), shape.num_rows)
        # A step that is outside in several ways is one step.
        self.extrapolation.num = min(self.extrapolation.num, with_this_one)
        return seconds

    def attention_us(self, shape: StepShape) -> float:
        """Of one layer."""
        if self._decodes is not None and shape.num_decodes and not shape.prefills:
            return self._decodes.microseconds(shape)
        us = self._attention.microseconds(shape)
        skew = self._skew_beside_prefill if shape.prefills else self._skew_alone
        if skew is not None and shape.decode_lengths:
            us = max(0.0, us + skew.microseconds(shape.decode_lengths))
        return us


class _SizeTable:
    """Seconds by size, summed over layers, for every size up to the largest that all were measured at."""

    def __init__(
        self,
        what: str,
        layers: Sequence[LayerTable],
        extrapolation: Extrapolation,
        padded: Callable[[int], int],
    ) -> None:
        self._what = what
        self._layers = layers
        self._extrapolation = extrapolation
        self._most = min((layer.sizes[-1] for layer in layers), default=0)
        self._seconds = [self._sum(min(padded(size), self._most)) for size in range(self._most + 1)]

    def at(self, size: int) -> float:
        if size <= self._most:
            return self._seconds[size]
        if not self._layers:
            return 0.0
        self._extrapolation.meet(self._what, size, 1, self._most)
        return self._seconds[-1] * size / self._most

    def _sum(self, size: int) -> float:
        us = sum(layer.per_step * layer.us[bisect_left(layer.sizes, size)] for layer in self._layers)
        return us * 1e-6


def _padding(sizes: tuple[int, ...]) -> Callable[[int], int]:
    def padded(size: int) -> int:
        return sizes[bisect_left(sizes, size)] if sizes and size <= sizes[-1] else size

    return padded
