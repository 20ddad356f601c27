"""Reads `moe.csv`: a layer of experts by tokens in the step and by how many experts these call upon.

Columns: tokens, activated_experts, time_us, and in newer files ep: over how many devices experts are spread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

from ksana.costs.profile_cost import LayerTable
from ksana.errors import ConfigError
from ksana.perf.csv_numbers import read_lines, read_rows

_MAX_POINTS = 1 << 16
_Line = Sequence[tuple[float, float]]
"""(place, microseconds), by place."""


def read_experts(
    path: Path, sizes: Sequence[int], num_layers: int, *, spread: int = 1, engines: int = 1
) -> LayerTable:
    """The layer at these numbers of tokens, as far as it was measured. Raises ConfigError.

    `spread`: over how many devices experts are spread whole (expert parallelism). `engines`: the tokens of so
    many, as many as this one has each, meet in the layer.

    What is routed where is in no table: every token is taken to call upon experts evenly and on its own, so
    that of E experts, k for each token, T tokens call upon E * (1 - (1 - k / E)**T). k is what one token
    called upon when it was measured on one device, E the most that any number did there. One of several
    devices has its share of E. Between points time is linear.
    """
    all_times = _times(path)
    whole = all_times.get(1, {})
    if not whole or min(whole) != 1 or len(whole) < 2:
        raise ConfigError(f"{path}: needs a step of one token, and larger ones, of experts on one device")
    num_per_token = whole[1][0][0]
    num_experts = max(line[-1][0] for line in whole.values())
    if not 0 < num_per_token <= num_experts:
        raise ConfigError(f"{path}: one token calls upon {num_per_token:g} of {num_experts:g} experts")
    times = all_times.get(spread, {})
    if len(times) < 2:
        known = ", ".join(map(str, sorted(all_times)))
        raise ConfigError(
            f"{path} has no rows of experts spread over {spread} devices (ep); it has them for {known}"
        )
    measured = sorted(times)
    us = []
    inside = [size for size in sizes if measured[0] <= size * engines <= measured[-1]]
    if not inside:
        raise ConfigError(f"{path}: too few tokens were measured for {engines} engines")
    for size in inside:
        num_tokens = size * engines
        called = num_experts / spread * (1 - (1 - num_per_token / num_experts) ** num_tokens)
        above = max(1, bisect_left(measured, num_tokens))
        around = [(tokens, _along(times[tokens], called)) for tokens in measured[above - 1 : above + 1]]
        us.append(_along(around, num_tokens))
    return LayerTable(name="moe", per_step=num_layers, sizes=tuple(inside), us=tuple(us))


def _times(path: Path) -> dict[int, dict[int, _Line]]:
    """By devices over which experts are spread, and by tokens: microseconds by experts called upon."""
    header, _ = read_lines(path, ("tokens",))
    columns = ("tokens", "activated_experts", "time_us")
    rows = read_rows(path, (*columns, "ep") if "ep" in header else columns)
    if len(rows) > _MAX_POINTS:
        raise ConfigError(f"{path} has more than {_MAX_POINTS} rows")
    times: dict[int, dict[int, dict[float, float]]] = {}
    for tokens, called, us, *spread in rows:
        devices = int(spread[0]) if spread else 1
        times.setdefault(devices, {}).setdefault(int(tokens), {})[called] = us
    if 1 not in times:
        raise ConfigError(f"{path} has no rows of experts on one device")
    return {
        devices: {tokens: sorted(line.items()) for tokens, line in lines.items()}
        for devices, lines in times.items()
    }


def _along(line: _Line, place: float) -> float:
    """On the straight between the two points next to it, or through the last two, but not below 0."""
    if len(line) == 1:
        return line[0][1]
    above = min(max(1, bisect_left(line, (place,))), len(line) - 1)
    (left, lower), (right, upper) = line[above - 1], line[above]
    return max(0.0, lower + (upper - lower) * (place - left) / (right - left))
