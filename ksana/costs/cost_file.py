"""Cost models as files: what a simulation needs to know of a model on a device."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ksana.atomic_file import write_atomically
from ksana.costs.checks import CostData, check_cost
from ksana.costs.fitted_cost import FittedCost, FittedTerms
from ksana.costs.profile_cost import ProfileCost, ProfileTables
from ksana.costs.step_cost import StepCost
from ksana.errors import ConfigError
from ksana.input_file import read_input

SCHEMA_VERSION = 1
MAX_FILE_BYTES = 64 << 20


class HeldOutError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far predictions were off for measurements that the fit did not see, in percent of these."""

    num_samples: int
    mean_abs_pct: float
    max_abs_pct: float


class _CostFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema_version: int
    source: str
    host_s: float
    errors: dict[str, HeldOutError]
    cost: CostData


class CostModel:
    """What a step takes on the device, and what the host takes beside it.

    `step`: predicts a step's seconds. `host_s`: seconds per step that the engine itself needs between a
    StepDone and the next step's start when nothing is planned ahead. `source`: what it was made from.
    `errors`: on held-out measurements, by their kind; empty if none were held out.
    """

    def __init__(
        self,
        data: CostData,
        *,
        host_s: float = 0.0,
        source: str = "",
        errors: dict[str, HeldOutError] | None = None,
        allow_extrapolation: bool = False,
    ) -> None:
        """Raises ConfigError for tables that contradict themselves."""
        check_cost(data, host_s)
        self.data = data
        self.host_s = host_s
        self.source = source
        self.errors = errors or {}
        self.step: StepCost = _compiled(data, allow_extrapolation)

    @property
    def num_extrapolated(self) -> int:
        """Steps so far whose shape was outside of what was measured; 0 where that is not allowed."""
        return self.step.extrapolation.num if isinstance(self.step, ProfileCost | FittedCost) else 0


def _compiled(data: CostData, allow_extrapolation: bool) -> StepCost:
    if isinstance(data, ProfileTables):
        return ProfileCost(data, allow_extrapolation)
    if isinstance(data, FittedTerms):
        return FittedCost(data, allow_extrapolation)
    return data


def load_cost(path: Path, allow_extrapolation: bool = False) -> CostModel:
    """Raises ConfigError for a file that cannot be read or is no cost model."""
    raw = read_input(path, MAX_FILE_BYTES, f"the cost model {path}")
    try:
        read = msgspec.json.decode(raw, type=_CostFile)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a cost model: {error}") from None
    if read.schema_version != SCHEMA_VERSION:
        raise ConfigError(
            f"{path} has schema version {read.schema_version}; this program reads {SCHEMA_VERSION}"
        )
    try:
        return CostModel(
            read.cost,
            host_s=read.host_s,
            source=read.source,
            errors=read.errors,
            allow_extrapolation=allow_extrapolation,
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def save_cost(path: Path, model: CostModel) -> None:
    """Raises ConfigError if the file cannot be written. A file that is there is replaced whole."""
    content = _CostFile(
        schema_version=SCHEMA_VERSION,
        source=model.source,
        host_s=model.host_s,
        errors=model.errors,
        cost=model.data,
    )
    try:
        write_atomically(path, msgspec.json.format(msgspec.json.encode(content), indent=1))
    except OSError as error:
        raise ConfigError(f"cannot write the cost model {path}: {error.strerror}") from None
