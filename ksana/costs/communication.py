"""What devices that share a model tell each other in a step, and how long that takes.

Times are measured, by operation, number of devices and bytes, or follow from a stated link: with its
bandwidth B (bytes per second out of one device) and latency L, N devices and S bytes in all,

    all_reduce      2 (N-1) L + 2 (N-1)/N S/B in a ring, or L + (N-1) S/B where every one reads all others,
                    whichever is less
    all_gather, reduce_scatter, all_to_all      (N-1) L + (N-1)/N S/B

which are the usual costs of these algorithms (Thakur, Rabenseifner and Gropp, 2005).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal, get_args

import msgspec

from ksana.errors import ConfigError

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    bytes_per_s: float
    latency_s: float


class MeasuredOperation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Microseconds at some sizes, which ascend. `sizes`: bytes of the whole result; for `reduce_scatter`, of
    what every device gives."""

    operation: Operation
    num_devices: int
    sizes: tuple[int, ...]
    us: tuple[float, ...]


class Exchange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """So many times in a step, with so many bytes for each token (or row) of it."""

    operation: Operation
    num_devices: int
    per_step: int
    bytes_each: float
    of_rows: bool = False
    """Rows, not tokens."""


class Communication(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    exchanges: tuple[Exchange, ...]
    measured: tuple[MeasuredOperation, ...] = ()
    link: Link | None = None
    """Of operations that were not measured."""


class CommunicationCost:
    """Cost: about 1 µs per exchange the first time a size is met."""

    def __init__(self, communication: Communication) -> None:
        """Raises ConfigError where neither a measurement nor a link tells what an exchange takes."""
        self._exchanges = communication.exchanges
        self._link = communication.link
        self._measured = {(one.operation, one.num_devices): one for one in communication.measured}
        self._known: dict[tuple[int, int], float] = {}
        for exchange in self._exchanges:
            self._us(exchange, 1.0)

    def seconds(self, num_tokens: int, num_rows: int) -> float:
        """Of all exchanges of a step."""
        seconds = self._known.get((num_tokens, num_rows))
        if seconds is None:
            us = 0.0
            for exchange in self._exchanges:
                size = exchange.bytes_each * (num_rows if exchange.of_rows else num_tokens)
                us += exchange.per_step * self._us(exchange, size)
            seconds = self._known[num_tokens, num_rows] = us * 1e-6
        return seconds

    def _us(self, exchange: Exchange, size: float) -> float:
        measured = self._measured.get((exchange.operation, exchange.num_devices))
        if measured is not None:
            return _between(measured, size)
        if self._link is None:
            raise ConfigError(
                f"nothing tells how long {exchange.operation} over {exchange.num_devices} devices takes: put "
                "communication.csv (op,num_devices,bytes,us) beside the tables, or state the bandwidth and "
                "latency of what connects them (--link-gb-per-s, --link-latency-us)"
            )
        return 1e6 * link_s(self._link, exchange.operation, exchange.num_devices, size)


def link_s(link: Link, operation: Operation, num_devices: int, size: float) -> float:
    """Seconds, by the formulas above."""
    others = num_devices - 1
    share_s = others / num_devices * size / link.bytes_per_s
    if operation == "all_reduce":
        return min(2 * (others * link.latency_s + share_s), link.latency_s + others * size / link.bytes_per_s)
    return others * link.latency_s + share_s


def _between(measured: MeasuredOperation, size: float) -> float:
    """Linear, as a latency and a bandwidth are; below the smallest size its time, above the largest the
    bandwidth of the last two."""
    sizes, us = measured.sizes, measured.us
    if size <= sizes[0]:
        return us[0]
    above = min(bisect_left(sizes, size), len(sizes) - 1)
    slope = max(0.0, us[above] - us[above - 1]) / (sizes[above] - sizes[above - 1])
    if size > sizes[-1]:
        return us[-1] + slope * (size - sizes[-1])
    return us[above - 1] + (us[above] - us[above - 1]) / (sizes[above] - sizes[above - 1]) * (
        size - sizes[above - 1]
    )
