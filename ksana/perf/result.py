"""`model_perf_result.json`: what the performance backend measured, and nothing that was made of it later."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from ksana.atomic_file import write_atomically
from ksana.errors import ConfigError
from ksana.input_file import read_input

SCHEMA_VERSION = 1
MAX_RESULT_BYTES = 256 << 20
MAX_REQUESTS = 4096
"""Of one batch."""
MAX_TOKENS = 1 << 24
"""Of one request."""

Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=10**18)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]


class RoundSample(msgspec.Struct, frozen=True, kw_only=True):
    """Nanoseconds of one round. Without planning ahead the parts add up to `step_ns`, also where the decoder
    layers run several times.

    With planning ahead a round is planned while the one before runs: `step_ns` then goes from the end of the
    former round to the end of this one, and `schedule_ns` lies beside it.
    """

    schedule_ns: Nanoseconds
    """From the order for the round to its step plan: scheduler, block allocator, SWA cache manager."""
    dispatch_ns: Nanoseconds
    """The step plan on its way to the worker, and the results on theirs back."""
    prepare_ns: Nanoseconds
    """In the worker: tables and arrays of the step, and its answer."""
    forward_ns: Nanoseconds
    """The model, divided by `layer_forward_round`."""
    repeats_ns: Nanoseconds = 0
    """The rest of the model's time, which further runs of the decoder layers took."""
    sampling_ns: Nanoseconds
    update_ns: Nanoseconds
    """The scheduler takes the results."""
    step_ns: Nanoseconds
    """The whole round, as it was (not divided by anything)."""


FIELDS = RoundSample.__struct_fields__


class OperatorSample(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one operator in one round, divided by nothing."""

    total_ns: int
    calls: int


class RequestGroup(msgspec.Struct, frozen=True, kw_only=True):
    """As in the batch file: so many requests of which each has S tokens and computes the last F."""

    sequence_len: Tokens
    forwarding_token_num: Tokens
    request_num: Annotated[int, msgspec.Meta(ge=1, le=MAX_REQUESTS)]


class BatchShape(msgspec.Struct, frozen=True, kw_only=True):
    requests: tuple[RequestGroup, ...]
    num_requests: int
    num_prefills: int
    """Requests that compute more than one token."""
    num_decodes: int
    num_forwarding_tokens: int
    num_kv_tokens: int
    """Sum of sequence lengths minus the tokens that are computed: what stands in the KV cache before."""
    num_fa_blocks: int | None = None
    """Blocks in use during the rounds; None for a batch that did not come so far."""
    num_swa_blocks: int | None = None


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    mean: float
    min: float
    max: float
    p50: float
    p90: float
    p99: float
    std: float
    """Of the population, as the rounds are all there is."""


class BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    shape: BatchShape
    warmup_rounds: int
    stat_rounds: int
    layer_forward_round: int = 1
    """How often the decoder layers ran within one round."""
    rounds: tuple[RoundSample, ...] = ()
    operator_rounds: tuple[dict[str, OperatorSample], ...] = ()
    """Rounds of their own, by operator name; they are in none of the other numbers."""
    summary: dict[str, Statistics] = {}
    """By the names of `RoundSample`."""
    error: str | None = None
    """Why the batch has no result."""


class PerfResult(msgspec.Struct, frozen=True, kw_only=True):
    """The file. `parallel_sizes` by name, `versions` by package."""

    schema_version: int = SCHEMA_VERSION
    model: str
    model_fingerprint: str
    device: str
    dtype: str
    parallel_sizes: dict[str, int]
    block_size: int
    versions: dict[str, str]
    plan_ahead: bool
    seed: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    batches: tuple[BatchResult, ...]
    skipped: tuple[str, ...] = ()
    """Names of batches for which a time limit, or whoever interrupted it, left no time."""
    interrupted: str | None = None
    """The name of the signal that ended the measurement early."""


def summarize(rounds: Sequence[RoundSample]) -> dict[str, Statistics]:
    """Statistics of each field; empty without rounds. Percentiles are interpolated linearly."""
    if not rounds:
        return {}
    return {name: statistics_of([getattr(sample, name) for sample in rounds]) for name in FIELDS}


def statistics_of(values: Sequence[float]) -> Statistics:
    """Of at least one value."""
    ordered = sorted(values)
    return Statistics(
        mean=statistics.fmean(ordered),
        min=float(ordered[0]),
        max=float(ordered[-1]),
        p50=percentile(ordered, 50),
        p90=percentile(ordered, 90),
        p99=percentile(ordered, 99),
        std=statistics.pstdev(ordered),
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted values, at least one; between two of them linearly."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def write_result(path: Path, result: PerfResult) -> None:
    """Raises OSError."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(result), indent=1))


def read_result(path: Path) -> PerfResult:
    """Raises ConfigError for a file that cannot be read or is no result."""
    raw = read_input(path, MAX_RESULT_BYTES)
    try:
        result = msgspec.json.decode(raw, type=PerfResult)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a result of `ksana perf`: {error}") from None
    if result.schema_version != SCHEMA_VERSION:
        raise ConfigError(
            f"{path} has schema version {result.schema_version}; this program reads {SCHEMA_VERSION}"
        )
    for batch in result.batches:
        if not _is_possible(batch.shape):
            raise ConfigError(f"{path}: batch {batch.name[:80]!r}: its shape contradicts itself")
    return result


def _is_possible(shape: BatchShape) -> bool:
    num_requests = sum(group.request_num for group in shape.requests)
    return num_requests == shape.num_requests <= MAX_REQUESTS and all(
        group.forwarding_token_num <= group.sequence_len for group in shape.requests
    )
