"""How a run is spread over devices, and so what they tell each other in each step.

Tensor parallel: every decoder layer ends both its halves with a sum over devices, so does the embedding, and
logits are gathered. With experts spread over the same devices that stays so. Data parallel engines of a dense
model share nothing. With experts they run in step: before each layer of experts all engines' tokens are
gathered, after it they are summed and handed back; the engines' steps are taken to be equally large.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import msgspec

from ksana.costs.communication import OPERATIONS, Communication, Exchange, Link, MeasuredOperation
from ksana.errors import ConfigError
from ksana.perf.csv_numbers import read_lines
from ksana.perf.model_shape import ModelShape

_ACTIVATION_BYTES = 2
"""bfloat16 or float16."""
_MAX_DEVICES = 4096
_MAX_BYTES = 1 << 48


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Over how many devices what is spread."""

    tensor: int = 1
    data: int = 1
    has_experts: bool = False
    is_expert_parallel: bool = False

    @property
    def of_experts(self) -> int:
        """Devices over which the experts are spread whole; 1: each device has a part of every one."""
        return self.tensor * self.data if self.is_expert_parallel else 1

    @property
    def in_step(self) -> int:
        """Engines whose tokens meet in a layer of experts."""
        return self.data if self.has_experts else 1


def exchanges_of(spread: Spread, shape: ModelShape) -> tuple[Exchange, ...]:
    """Raises ConfigError for sizes of the model that are needed and unknown, and for what no table is of."""
    if spread.in_step > 1 and not spread.is_expert_parallel:
        raise ConfigError(
            f"experts in parts over {spread.data} data parallel engines: no table is of such parts; runs "
            "with enable_expert_parallel are read"
        )
    if spread.tensor == 1 and spread.in_step == 1:
        return ()
    num_layers = _known(shape.num_layers, "num_hidden_layers", "--num-layers")
    hidden = _known(shape.hidden_size, "hidden_size", "--hidden-size") * _ACTIVATION_BYTES
    found = []
    if spread.tensor > 1:
        vocab = _known(shape.vocab_size, "vocab_size", "--vocab-size") * _ACTIVATION_BYTES
        found = [
            Exchange(
                operation="all_reduce",
                num_devices=spread.tensor,
                per_step=2 * num_layers + 1,
                bytes_each=hidden,
            ),
            Exchange(
                operation="all_gather",
                num_devices=spread.tensor,
                per_step=1,
                bytes_each=vocab,
                of_rows=True,
            ),
        ]
    if spread.in_step > 1:
        found += [
            Exchange(
                operation=operation,
                num_devices=spread.in_step,
                per_step=num_layers,
                bytes_each=hidden * spread.in_step,
            )
            for operation in ("all_gather", "reduce_scatter")
        ]
    return tuple(found)


def _known(value: int | None, name: str, flag: str) -> int:
    if value is None:
        raise ConfigError(
            f"what devices tell each other depends on {name}, which is unknown: put the model's config.json "
            f"beside the tables, or give {flag}"
        )
    return value


def communication_of(
    directory: Path, spread: Spread, shape: ModelShape, link: Link | None
) -> Communication | None:
    """None for one device, and for engines that share nothing. Raises ConfigError for a table that is none;
    whether it has what is needed is for `CommunicationCost` to say."""
    exchanges = exchanges_of(spread, shape)
    if not exchanges:
        return None
    path = directory / "communication.csv"
    measured = read_communication(path) if path.exists() else ()
    return Communication(exchanges=exchanges, measured=measured, link=link)


def read_communication(path: Path) -> tuple[MeasuredOperation, ...]:
    """`communication.csv`: op, num_devices, bytes, us. Raises ConfigError."""
    header, lines = read_lines(path, ("op", "num_devices", "bytes", "us"))
    found: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for number, line in lines:
        try:
            name = line[header["op"]].strip()
            devices, size, us = (float(line[header[column]]) for column in ("num_devices", "bytes", "us"))
        except (ValueError, IndexError):
            raise ConfigError(f"{path}, line {number}: expected op, and numbers of the others") from None
        if name not in OPERATIONS:
            raise ConfigError(f"{path}, line {number}: {name[:40]!r} is none of {', '.join(OPERATIONS)}")
        if not (2 <= devices <= _MAX_DEVICES and 0 <= size <= _MAX_BYTES and 0 <= us <= 1e12):
            raise ConfigError(f"{path}, line {number}: a value is not a number, too small, or absurd")
        found[name, int(devices)][int(size)] = us
    measured = []
    for operation in OPERATIONS:
        for (name, num_devices), times in sorted(found.items()):
            if name != operation:
                continue
            if len(times) < 2:
                raise ConfigError(f"{path}: {name} over {num_devices} devices needs two sizes or more")
            sizes = tuple(sorted(times))
            us_of = tuple(times[size] for size in sizes)
            measured.append(
                MeasuredOperation(operation=operation, num_devices=num_devices, sizes=sizes, us=us_of)
            )
    return tuple(measured)
