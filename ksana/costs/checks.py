"""Whether the numbers of a cost model can be: they may come out of a file."""

from __future__ import annotations

import itertools

from ksana.costs.attention_table import AttentionGrid
from ksana.costs.communication import Communication
from ksana.costs.fitted_cost import QUANTITIES, FittedTerms
from ksana.costs.profile_cost import LayerTable, ProfileTables
from ksana.costs.row_blocks import RowBlocks
from ksana.costs.skew_table import SkewRates
from ksana.costs.step_cost import LinearStepCost
from ksana.errors import ConfigError

MAX_TABLE_SIZE = 1 << 20
"""Tokens or rows: tables are spread out over all sizes up to their largest."""

MAX_DECODES = 1 << 16

MAX_TIME = 1e12
"""Microseconds or seconds. Sums and products of such times with sizes stay finite."""

CostData = LinearStepCost | ProfileTables | FittedTerms


def check_cost(data: CostData, host_s: float) -> None:
    """Raises ConfigError for numbers that no measurement gives, and tables that do not fit together."""
    _check_times("host_s", (host_s,))
    if isinstance(data, LinearStepCost):
        _check_times("linear cost", (data.fixed_s, data.per_token_s, data.per_attended_token_s))
    elif isinstance(data, FittedTerms):
        _check_times("fitted cost", (data.constant_s, *[term.seconds for term in data.terms]))
        if any(term.knot < 0 for term in data.terms):
            raise ConfigError("fitted cost: a knot is negative")
        for name in QUANTITIES:
            if data.most.get(name, -1) < 0:
                raise ConfigError(f"fitted cost: most does not tell the most {name} that were measured")
    else:
        if data.num_layers < 1:
            raise ConfigError(f"a model has at least one layer, not {data.num_layers}")
        for layer in (*data.dense, *data.per_sequence):
            _check_layer(layer)
        if any(not 0 < size <= MAX_TABLE_SIZE for size in data.padded_sizes) or not _ascend(
            data.padded_sizes
        ):
            raise ConfigError("padded_sizes must ascend from 1")
        _check_grid(data.attention)
        for rates in (data.skew_alone, data.skew_beside_prefill):
            if rates is not None:
                _check_rates(rates)
        if data.blocks is not None:
            _check_blocks(data.blocks)
        launches = data.launches
        if not all(abs(us) <= MAX_TIME for us in (launches.full_us, launches.piecewise_us, launches.none_us)):
            raise ConfigError("launches: a time is not a number, or absurd")
        if data.communication is not None:
            _check_communication(data.communication)


def _check_layer(layer: LayerTable) -> None:
    if not layer.sizes or len(layer.sizes) != len(layer.us) or not _ascend(layer.sizes):
        raise ConfigError(f"layer {layer.name}: sizes must ascend, and have a time each")
    if layer.sizes[0] < 0 or layer.sizes[-1] > MAX_TABLE_SIZE or layer.per_step < 0:
        raise ConfigError(f"layer {layer.name}: a size or count is outside 0 to {MAX_TABLE_SIZE}")
    _check_times(f"layer {layer.name}", layer.us)


def _check_grid(grid: AttentionGrid) -> None:
    for name, axis in (
        ("decodes", grid.decodes),
        ("decode_kv", grid.decode_kv),
        ("chunks", grid.chunks),
        ("before", grid.before),
        ("mixed_decodes", grid.mixed_decodes),
    ):
        if len(axis) < (1 if name == "mixed_decodes" else 2) or axis[0] < 0 or not _ascend(axis):
            raise ConfigError(f"attention: {name} must have two points or more, and ascend")
    if grid.chunks[0] < 1 or grid.decodes[0] < 1 or grid.mixed_decodes[0] < 1:
        raise ConfigError("attention: chunks and numbers of decodes begin at 1 or above")
    num_kv = len(grid.decode_kv)
    tables = [
        ("decode_us", grid.decode_us, len(grid.decodes), num_kv),
        ("prefill_us", grid.prefill_us, len(grid.chunks), len(grid.before)),
        *[("mixed_us", block, len(grid.mixed_decodes), num_kv) for line in grid.mixed_us for block in line],
    ]
    if len(grid.mixed_us) != len(grid.chunks) or any(len(line) != len(grid.before) for line in grid.mixed_us):
        raise ConfigError("attention: mixed_us does not have the size of its axes")
    for name, table, num_rows, num_columns in tables:
        if len(table) != num_rows or any(len(row) != num_columns for row in table):
            raise ConfigError(f"attention: {name} does not have the size of its axes")
        for row in table:
            _check_times(f"attention, {name}", row)


def _check_rates(rates: SkewRates) -> None:
    """Rates may be negative: an unequal batch can be faster."""
    if not (len(rates.decodes) == len(rates.longer) == len(rates.us_per_token)):
        raise ConfigError("skew: its lists have different lengths")
    if not _ascend(rates.decodes) or any(not 2 <= num <= MAX_DECODES for num in rates.decodes):
        raise ConfigError(f"skew: numbers of decodes must ascend from 2 to {MAX_DECODES} at most")
    for num, longer, values in zip(rates.decodes, rates.longer, rates.us_per_token, strict=True):
        if not longer or len(longer) != len(values) or not _ascend((0, *longer, num)):
            raise ConfigError(f"skew of {num} decodes: numbers of longer ones must ascend, with a rate each")
        if not all(abs(value) <= MAX_TIME for value in values):
            raise ConfigError(f"skew of {num} decodes: a rate is not a number, or absurd")


def _check_communication(communication: Communication) -> None:
    for exchange in communication.exchanges:
        if exchange.num_devices < 2 or exchange.per_step < 0 or not 0 <= exchange.bytes_each <= MAX_TIME:
            raise ConfigError(f"communication: {exchange.operation} over {exchange.num_devices} devices")
    for one in communication.measured:
        name = f"communication: {one.operation} over {one.num_devices} devices"
        if len(one.sizes) < 2 or len(one.sizes) != len(one.us) or not _ascend(one.sizes) or one.sizes[0] < 0:
            raise ConfigError(f"{name}: two sizes or more must ascend, and have a time each")
        _check_times(name, one.us)
    link = communication.link
    if link is not None and not (0 < link.bytes_per_s <= 1e18 and 0 <= link.latency_s <= 1e3):
        raise ConfigError("a link has a bandwidth above 0 and a latency of 0 to 1000 s")


def _check_blocks(blocks: RowBlocks) -> None:
    for name in ("heads", "slots"):
        if not 1 <= getattr(blocks, name) <= MAX_DECODES:
            raise ConfigError(f"blocks: {name} must be from 1 to {MAX_DECODES}, not {getattr(blocks, name)}")
    if blocks.split_below < 0:
        raise ConfigError("blocks: split_below is negative")
    _check_times("blocks", (blocks.serial_us, blocks.shared_us))


def _check_times(what: str, times: tuple[float, ...]) -> None:
    if not all(0 <= time <= MAX_TIME for time in times):
        raise ConfigError(f"{what}: a time is negative, not a number, or absurd")


def _ascend(values: tuple[int, ...]) -> bool:
    return all(before < after for before, after in itertools.pairwise(values))
