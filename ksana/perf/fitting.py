"""Cost models from measurements: from a `model_perf_result.json`, or from per-layer profile tables."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from ksana.costs.communication import Link
from ksana.costs.cost_file import CostModel, HeldOutError
from ksana.costs.fitted_cost import QUANTITIES, FittedCost, FittedTerms, Quantity, Term
from ksana.costs.step_cost import StepShape
from ksana.errors import ConfigError
from ksana.perf.attention_file import grid_errors
from ksana.perf.devices import processors_of
from ksana.perf.model_shape import ModelShape, read_meta, read_shape, tables_of
from ksana.perf.nonnegative_fit import Array, fit_nonnegative
from ksana.perf.parallel import Spread, communication_of
from ksana.perf.profile_errors import held_out, profile_errors
from ksana.perf.profile_tables import read_profile
from ksana.perf.result import BatchResult, BatchShape, PerfResult, read_result
from ksana.perf.robust_fit import fit_evenly
from ksana.perf.skew_rates import read_skew
from ksana.perf.unequal import Device, with_unequal

MIN_SAMPLES = 8
_NUM_FOLDS = 10
_MAX_KNOTS = 4
_MAX_CANDIDATES = 64
"""Sizes at which a knot is tried, evenly among those that were measured."""
_WORTH_A_KNOT = 0.1
"""A term is added when it takes away so much of the squared relative error that is left."""
_GOOD_ENOUGH = 1e-6
"""A relative error (root of the mean square) with which no knot is looked for."""


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """A step, and how long it took."""

    shape: StepShape
    seconds: float


def fit_profile(
    directory: Path,
    *,
    num_layers: int | None = None,
    unequal_kv: bool = False,
    stated: ModelShape | None = None,
    model: str = "",
    spread: Spread | None = None,
    link: Link | None = None,
) -> CostModel:
    """From the tables of a directory (`ksana.perf.profile_tables`). Raises ConfigError.

    Attention takes longer when decodes have KV of unequal lengths: what `skew.csv` says of it is used where
    that file is. `unequal_kv`: it must be there. `stated`: sizes of the model that are known, instead of
    `num_layers`. `model`: its name, before the one in `meta.yaml`. `spread`, `link`: devices that share the
    model, and what connects them (`parallel`).

    The held-out errors: of each inner grid point from its neighbours, and of `skew.csv` if there is one.
    """
    meta = read_meta(directory)
    shape = read_shape(directory, (stated or ModelShape(num_layers=num_layers)), model or meta.model)
    assert shape.num_layers is not None
    spread = spread or Spread()
    folder = tables_of(directory, spread.tensor)
    spread = msgspec.structs.replace(spread, has_experts=(folder / "moe.csv").exists())
    tables = read_profile(folder, num_layers=shape.num_layers, engine=directory, spread=spread)
    communication = communication_of(directory, spread, shape, link)
    tables = msgspec.structs.replace(tables, communication=communication)
    skew_file = folder / "skew.csv"
    skew = read_skew(skew_file) if unequal_kv or skew_file.exists() else []
    if unequal_kv and not skew:
        raise ConfigError(f"{skew_file} has no batch of decodes of unequal KV lengths")
    heads = None if shape.kv_heads is None else max(1, shape.kv_heads // spread.tensor)
    device = Device(kv_heads=heads, processors=processors_of(meta.gpu))
    tables = with_unequal(tables, skew, device)
    errors = profile_errors(tables, skew, device)
    if of_grids := grid_errors(folder / "attention.csv"):
        errors["attention, each of its grids from the others"] = held_out(of_grids)
    return CostModel(tables, source=f"profile tables {directory.name}", errors=errors)


def fit_result(path: Path) -> CostModel:
    """From a result of `ksana perf`. Raises ConfigError when it has too little to fit.

    A sample is the median over a batch's rounds: one round that was disturbed moves it little. Batches that
    failed, and those that ran the decoder layers several times per round, are left out.
    """
    result = read_result(path)
    measurements = [measurement for batch in result.batches if (measurement := _measurement(batch))]
    if any(measurement.seconds == 0 for measurement in measurements):
        raise ConfigError(f"{path} has a step that took no time, which no cost model can be fitted to")
    if len(measurements) < MIN_SAMPLES:
        raise ConfigError(
            f"{path} has {len(measurements)} batches that tell what a step takes; "
            f"a fit needs {MIN_SAMPLES}, and `ksana perf --sweep` makes enough of them"
        )
    fitted = fit_terms(measurements)
    return CostModel(
        fitted,
        host_s=_host_s(result),
        source=f"{result.model} on {result.device}, {result.dtype}: {len(measurements)} measured steps",
        errors={"held-out steps": cross_validate(measurements)},
    )


def _measurement(batch: BatchResult) -> Measurement | None:
    if batch.error is not None or not batch.rounds or batch.layer_forward_round != 1:
        return None
    worker_ns = [sample.prepare_ns + sample.forward_ns + sample.sampling_ns for sample in batch.rounds]
    return Measurement(shape=step_shape_of(batch.shape), seconds=statistics.median(worker_ns) * 1e-9)


def step_shape_of(batch: BatchShape) -> StepShape:
    """The shape of one round. Every request computes its last tokens, so every row samples."""
    prefills: list[tuple[int, int]] = []
    num_decodes = decode_kv = max_decode_kv = num_tokens = 0
    for group in batch.requests:
        tokens, before = group.forwarding_token_num, group.sequence_len - group.forwarding_token_num
        num_tokens += tokens * group.request_num
        if tokens == 1:
            num_decodes += group.request_num
            decode_kv += before * group.request_num
            max_decode_kv = max(max_decode_kv, before)
        else:
            prefills += [(tokens, before)] * group.request_num
    return StepShape(
        num_tokens=num_tokens,
        num_rows=batch.num_requests,
        num_samples=batch.num_requests,
        prefills=tuple(prefills),
        num_decodes=num_decodes,
        decode_kv=decode_kv,
        max_decode_kv=max_decode_kv,
    )


def _host_s(result: PerfResult) -> float:
    """Median over batches of what a step takes beside the worker's part; with planning ahead that lies beside
    the step before, and nothing is left."""
    if result.plan_ahead:
        return 0.0
    per_batch = [
        statistics.median(
            sample.schedule_ns + sample.dispatch_ns + sample.update_ns for sample in batch.rounds
        )
        for batch in result.batches
        if batch.rounds
    ]
    return statistics.median(per_batch) * 1e-9


def fit_terms(measurements: Sequence[Measurement]) -> FittedTerms:
    """Non-negative coefficients of a term for each quantity, and for some knots in the number of tokens.

    Knots (time that grows faster or slower from some size on) are tried one by one, and kept as long as they
    take away a good part of the squared relative error left. What stands then is fitted again, more evenly.
    """
    terms = [Term(quantity=quantity) for quantity in QUANTITIES]
    sizes = sorted({measurement.shape.num_tokens for measurement in measurements})
    inner = sizes[1:-1]
    stride = max(1, -(-len(inner) // _MAX_CANDIDATES))
    candidates = [
        Term(quantity="tokens", form=form, knot=knot)
        for knot in inner[::stride]
        for form in ("up_to", "over")
    ]
    coefficients, error = _solve(terms, measurements)
    for _ in range(_MAX_KNOTS):
        if not candidates or error <= _GOOD_ENOUGH**2 * len(measurements):
            break
        tried = [(*_solve([*terms, candidate], measurements), candidate) for candidate in candidates]
        best, best_error, candidate = min(tried, key=lambda solved: solved[1])
        if best_error > (1 - _WORTH_A_KNOT) * error:
            break
        terms.append(candidate)
        candidates.remove(candidate)
        coefficients, error = best, best_error
    coefficients = fit_evenly(*_equations(terms, measurements), coefficients)
    most: dict[Quantity, int] = {
        name: max(amount(measurement.shape) for measurement in measurements)
        for name, amount in QUANTITIES.items()
    }
    return FittedTerms(
        constant_s=float(coefficients[0]),
        terms=tuple(
            msgspec.structs.replace(term, seconds=float(seconds))
            for term, seconds in zip(terms, coefficients[1:], strict=True)
            if seconds > 0
        ),
        most=most,
    )


def _solve(terms: Sequence[Term], measurements: Sequence[Measurement]) -> tuple[Array, float]:
    """Coefficients (of the constant first) and the sum of squared relative errors."""
    units, seconds = _equations(terms, measurements)
    relative = units / seconds[:, None]
    ones = np.ones(len(measurements))
    coefficients = fit_nonnegative(relative, ones)
    return coefficients, float(np.sum((relative @ coefficients - ones) ** 2))


def _equations(terms: Sequence[Term], measurements: Sequence[Measurement]) -> tuple[Array, Array]:
    """Units of a constant and of each term, [m, 1 + n], and the seconds they took, [m]."""
    units = [[1, *[term.units(measurement.shape) for term in terms]] for measurement in measurements]
    seconds = [measurement.seconds for measurement in measurements]
    return np.array(units, dtype=np.float64), np.array(seconds)


def cross_validate(measurements: Sequence[Measurement]) -> HeldOutError:
    """Each tenth is predicted from a fit, knots included, to the other nine. They are drawn, the same ones
    for as many measurements: a sweep has its kinds of steps in turn, so every tenth would be of one kind."""
    errors: list[float] = []
    num_folds = min(_NUM_FOLDS, len(measurements))
    drawn = random.Random(0).sample(measurements, len(measurements))
    for fold in range(num_folds):
        seen = [m for index, m in enumerate(drawn) if index % num_folds != fold]
        cost = FittedCost(fit_terms(seen), allow_extrapolation=True)
        errors += [100 * abs(cost.seconds(m.shape) / m.seconds - 1) for m in drawn[fold::num_folds]]
    return held_out(errors)
