"""What launching takes, which a table of kernels does not hold: from how many kernels a step has.

A *captured graph* is launched once, and its kernels follow each other without what a profiler counts in each:
1.66 to 1.81 µs per kernel by the measurements of LLMServingSim's makers, who ran the same steps of two models
with and without graphs on one card (its profiler's README; 1.8 here). Their profiler writes such measurements
into `step.csv`; where it is there, it is what counts.

*Without a graph* the host launches kernel by kernel, for about 10 µs each: dispatch in Python and PyTorch,
and the call into the driver (published figures go from 5 to 20). The device waits for all of it when the host
begins once the step before is done, and for none when it has finished by then. Nothing in a profile tells
which; it is taken to wait. docs/fidelity.md has the figures of both.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from ksana.costs.launches import Launches
from ksana.costs.profile_cost import LayerTable
from ksana.errors import ConfigError
from ksana.perf.csv_numbers import read_lines

GRAPH_SAVES_US = 1.8
HOST_US = 10.0
_ATTENTION_KERNELS = 2
"""Of a layer: KV is written, then attended to."""


def launch_times(num_layers: int, layers: tuple[LayerTable, ...], step_file: Path) -> Launches:
    """For an engine that runs small steps from captured graphs. `layers`: all but attention. Raises
    ConfigError."""
    others = sum(layer.per_step for layer in layers)
    attention = _ATTENTION_KERNELS * num_layers
    saved = _measured(step_file) if step_file.exists() else {}
    full_us = saved.get("full", GRAPH_SAVES_US * (others + attention))
    piecewise_us = saved.get("piecewise", GRAPH_SAVES_US * others)
    # Between two of its attentions a layer's other kernels are one graph.
    launched = attention + num_layers + 1
    return Launches(
        full_us=-full_us,
        piecewise_us=HOST_US * launched - piecewise_us,
        none_us=HOST_US * (others + attention),
    )


def _measured(path: Path) -> dict[str, float]:
    """By branch: the median of what its steps saved, which is the same for small and large ones."""
    header, lines = read_lines(path, ("branch", "saved_us"))
    found: dict[str, list[float]] = {}
    for number, line in lines:
        try:
            branch, saved = line[header["branch"]], float(line[header["saved_us"]])
        except (ValueError, IndexError):
            raise ConfigError(f"{path}, line {number}: expected a branch and a number in saved_us") from None
        if not abs(saved) < 1e9:
            raise ConfigError(f"{path}, line {number}: saved_us is not a number, or absurd")
        found.setdefault(branch, []).append(saved)
    return {branch: max(0.0, statistics.median(values)) for branch, values in found.items()}
