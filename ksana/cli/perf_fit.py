"""`ksana perf --fit`, and the end of a run with `--cost-file`: a cost model, and how far it is off."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ksana.costs.cost_file import save_cost
from ksana.errors import ConfigError, ServiceError
from ksana.perf.batches import Batch
from ksana.perf.fitting import MIN_SAMPLES, fit_profile, fit_result
from ksana.perf.output_files import check_outputs


def fit(source: Path, cost_file: Path, num_layers: int | None, *, unequal_kv: bool = False) -> int:
    """Make a cost model of a result or of a directory of profile tables, say how far it is off, write it.
    The exit code. Raises ConfigError."""
    check_outputs({"result": source}, {"--cost-file": cost_file})
    if source.is_dir():
        if num_layers is None:
            raise ConfigError(
                f"{source} holds profiles of one layer: say with --num-layers how many there are"
            )
        model = fit_profile(source, num_layers=num_layers, unequal_kv=unequal_kv)
    else:
        if num_layers is not None or unequal_kv:
            flag = "--unequal-kv" if num_layers is None else "--num-layers"
            raise ConfigError(f"{flag} has no meaning for a result, which is of the whole model")
        model = fit_result(source)
    save_cost(cost_file, model)
    print(f"cost model: {cost_file}")
    print(f"  {model.source}; {model.host_s * 1e3:.3f} ms beside the worker")
    for kind, error in model.errors.items():
        print(
            f"  {kind}: {error.mean_abs_pct:.2f} % off on average, {error.max_abs_pct:.2f} % at most, "
            f"{error.num_samples} of them"
        )
    return 0


def check_enough(file: Path, batches: Sequence[Batch]) -> None:
    """Raises ConfigError for batches of which no cost model can be made, before they are measured."""
    num_useful = sum(batch.layer_forward_round == 1 for batch in batches)
    if num_useful < MIN_SAMPLES:
        raise ConfigError(
            f"{file}: {num_useful} batches with a layer_forward_round of 1, but a fit (--cost-file) needs "
            f"{MIN_SAMPLES}; --sweep makes enough of them"
        )


def fit_measured(result_file: Path, cost_file: Path) -> int:
    """Of a result just written, whose failed batches may have left too few. Raises ServiceError: by now
    something has run, and the exit code is not that of wrong files."""
    try:
        return fit(result_file, cost_file, None)
    except ConfigError as error:
        raise ServiceError(str(error)) from error
