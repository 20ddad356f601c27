"""Reads a directory of per-layer profile tables into a cost.

Files: `dense.csv` (layer, tokens, time_us), `per_sequence.csv` (layer, sequences, time_us),
`attention.csv` (see `attention_file`), and for models with experts `moe.csv` (`expert_table`), as the
profilers of LLMServingSim write them. `meta.json`, if there is one, says how the engine of a recorded run
padded its steps.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ksana.costs.launches import Launches
from ksana.costs.profile_cost import LayerTable, ProfileTables
from ksana.errors import ConfigError
from ksana.perf.attention_file import read_attention
from ksana.perf.csv_numbers import read_lines, read_rows
from ksana.perf.expert_table import read_experts
from ksana.perf.graph_settings import read_graphs
from ksana.perf.launch_times import launch_times
from ksana.perf.parallel import Spread
from ksana.shown import shown

_ONCE_PER_STEP = frozenset({"embedding", "final_layernorm", "lm_head", "sampler"})
_PER_LAYER = {"layernorm": 2}
"""Before attention and before the MLP. Every other kind stands once in a decoder layer."""


def read_profile(
    directory: Path, *, num_layers: int, engine: Path | None = None, spread: Spread | None = None
) -> ProfileTables:
    """`engine`: the directory with `meta.json`, if another one. `spread`: over how many devices experts are.
    Raises ConfigError, with file and line, for anything that is not such a directory."""
    spread = spread or Spread()
    if num_layers < 1:
        raise ConfigError(f"a model has at least one layer, not {num_layers}")
    dense = _layers(directory / "dense.csv", "tokens", num_layers)
    if (directory / "moe.csv").exists():
        sizes = sorted({size for layer in dense for size in layer.sizes})
        experts = read_experts(
            directory / "moe.csv", sizes, num_layers, spread=spread.of_experts, engines=spread.data
        )
        dense = (*dense, experts)
    _check_kinds(directory, {layer.name for layer in dense})
    per_sequence = _layers(directory / "per_sequence.csv", "sequences", num_layers)
    graphs = read_graphs((engine or directory) / "meta.json")
    launches = Launches()
    if graphs.is_known:
        launches = launch_times(num_layers, (*dense, *per_sequence), directory / "step.csv")
    if not graphs.are_whole:
        launches = msgspec.structs.replace(launches, full_us=launches.piecewise_us)
    return ProfileTables(
        num_layers=num_layers,
        dense=dense,
        per_sequence=per_sequence,
        attention=read_attention(directory / "attention.csv"),
        padded_sizes=graphs.sizes,
        launches=launches,
    )


def missing_kinds(tables: ProfileTables) -> list[str]:
    """Layers that every decoder has and the tables do not: what they take is left out of every step."""
    names = {layer.name for layer in (*tables.dense, *tables.per_sequence)}
    usual = {"qkv_proj", "o_proj", "layernorm", "embedding", "lm_head", "sampler"}
    usual |= {"moe"} if "moe" in names else {"gate_up_proj", "down_proj"}
    return sorted(usual - names)


def _check_kinds(directory: Path, names: set[str]) -> None:
    """Every decoder layer is taken to be like the others. Raises ConfigError where the tables are of several
    kinds of them: nothing tells how many there are of each."""
    linear = directory / "linear_attention.csv"
    if linear.exists():
        raise ConfigError(f"{linear}: models with two kinds of attention are not read")
    both = names & {"gate_up_proj", "down_proj"}
    if both and "moe" in names:
        raise ConfigError(
            f"{directory} has experts (moe.csv) and a dense MLP ({', '.join(sorted(both))} in dense.csv); "
            "nothing tells which layers have which"
        )


def _layers(path: Path, size_column: str, num_layers: int) -> tuple[LayerTable, ...]:
    header, lines = read_lines(path, ("layer", size_column, "time_us"))
    values = read_rows(path, (size_column, "time_us"))
    by_name: dict[str, dict[int, float]] = {}
    for (number, line), (size, us) in zip(lines, values, strict=True):
        name = line[header["layer"]]
        if int(size) in by_name.setdefault(name, {}):
            raise ConfigError(
                f"{path}, line {number}: {shown(name)} of {int(size)} {size_column} stands twice"
            )
        by_name[name][int(size)] = us
    if not by_name:
        raise ConfigError(f"{path} has no rows")
    largest = max(map(max, by_name.values()))
    for name, times in by_name.items():
        if max(times) < largest:
            reach = f"{max(times)} {size_column}, other layers up to {largest}"
            raise ConfigError(f"{path}: {shown(name)} is measured up to {reach}; is the file cut off?")
    return tuple(
        LayerTable(
            name=name,
            per_step=1 if name in _ONCE_PER_STEP else _PER_LAYER.get(name, 1) * num_layers,
            sizes=tuple(sorted(times)),
            us=tuple(times[size] for size in sorted(times)),
        )
        for name, times in by_name.items()
    )
