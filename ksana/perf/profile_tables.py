"""Reads a directory of per-layer profile tables into a cost.

Files: `dense.csv` (layer, tokens, time_us), `per_sequence.csv` (layer, sequences, time_us),
`attention.csv` (see `attention_file`), and for models with experts `moe.csv` (`expert_table`), as the
profilers of LLMServingSim write them. `meta.json`, if there is one, says how the engine of a recorded run
padded its steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ksana.costs.launches import Launches
from ksana.costs.profile_cost import LayerTable, ProfileTables
from ksana.errors import ConfigError
from ksana.input_file import read_input
from ksana.perf.attention_file import read_attention
from ksana.perf.csv_numbers import MAX_FILE_BYTES, read_lines, read_rows
from ksana.perf.expert_table import read_experts
from ksana.perf.launch_times import launch_times
from ksana.perf.parallel import Spread

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
    padded_sizes = _padded_sizes((engine or directory) / "meta.json")
    launches = Launches()
    if padded_sizes:
        launches = launch_times(num_layers, (*dense, *per_sequence), directory / "step.csv")
    return ProfileTables(
        num_layers=num_layers,
        dense=dense,
        per_sequence=per_sequence,
        attention=read_attention(directory / "attention.csv"),
        padded_sizes=padded_sizes,
        launches=launches,
    )


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
    for (_, line), (size, us) in zip(lines, values, strict=True):
        by_name.setdefault(line[header["layer"]], {})[int(size)] = us
    if not by_name:
        raise ConfigError(f"{path} has no rows")
    return tuple(
        LayerTable(
            name=name,
            per_step=1 if name in _ONCE_PER_STEP else _PER_LAYER.get(name, 1) * num_layers,
            sizes=tuple(sorted(times)),
            us=tuple(times[size] for size in sorted(times)),
        )
        for name, times in by_name.items()
    )


class _Compilation(msgspec.Struct):
    cudagraph_capture_sizes: list[int] | None = None


class _Resolved(msgspec.Struct):
    compilation_config: _Compilation | None = None


class _Engine(msgspec.Struct):
    max_num_seqs: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    enforce_eager: bool = False


class _Meta(msgspec.Struct):
    resolved_config: _Resolved | None = None
    engine_kwargs: _Engine | None = None


_SMALLEST_GRAPHS = (1, 2, 4)
_LARGEST_GRAPH = 512


def captured_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Sizes for which vLLM captures graphs unless it is told others: by 8 up to 256, by 16 above, and no more
    than twice the sequences it may run."""
    most = min(2 * max_num_seqs, _LARGEST_GRAPH)
    sizes = (*_SMALLEST_GRAPHS, *range(8, 256, 8), *range(256, _LARGEST_GRAPH + 1, 16))
    return tuple(size for size in sizes if size <= most)


def _padded_sizes(path: Path) -> tuple[int, ...]:
    """Sizes of captured CUDA graphs, from the settings of the recorded run; none without that file. Where the
    record lacks them, they are those that its engine takes by itself."""
    if not path.exists():
        return ()
    try:
        meta = msgspec.json.decode(read_input(path, MAX_FILE_BYTES), type=_Meta)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None
    compilation = meta.resolved_config.compilation_config if meta.resolved_config is not None else None
    sizes = compilation.cudagraph_capture_sizes if compilation is not None else None
    engine = meta.engine_kwargs
    if engine is not None and engine.enforce_eager:
        return ()
    if sizes is None and engine is not None and engine.max_num_seqs is not None:
        return captured_sizes(engine.max_num_seqs)
    return tuple(sorted({size for size in sizes or () if size > 0}))
