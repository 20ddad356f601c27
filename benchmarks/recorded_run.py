"""A run of another engine, recorded: what was asked, how the engine was set up, and what became of it.

`workload.jsonl` (arrival_time_ns, input_tok_ids, output_toks), `meta.json` (settings of the engine),
`requests.jsonl` (queued_ts, scheduled_ts, first_token_ts, last_token_ts per request, seconds of one clock)
and `timeseries.csv` (t, running, waiting, kv_cache_pct), which may be missing, as the bench of LLMServingSim
writes them.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from ksana.errors import ConfigError

T = TypeVar("T")


MAX_RUN_NS = 10**15

TokenId = Annotated[int, Meta(ge=0, lt=2**32)]
Devices = Annotated[int, Meta(ge=1, le=1024)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]


class AskedRequest(msgspec.Struct, frozen=True):
    arrival_time_ns: Annotated[int, Meta(ge=0, le=MAX_RUN_NS)]
    input_tok_ids: Annotated[tuple[TokenId, ...], Meta(min_length=1)]
    output_toks: Annotated[int, Meta(ge=1, le=2**24)]


class ServedRequest(msgspec.Struct, frozen=True):
    """`arrival_time` is by the client's wall clock, the rest by the engine's monotonic one. The engine takes
    requests from its queue between two steps: that is `queued_ts`."""

    arrival_time: Seconds
    queued_ts: Seconds
    scheduled_ts: Seconds
    first_token_ts: Seconds
    last_token_ts: Seconds
    output_toks: int


class Sample(msgspec.Struct, frozen=True):
    """Of the engine's own statistics, `t` seconds after the start."""

    t: float
    running: int
    waiting: int
    kv_cache_pct: float = 0.0


class EngineKwargs(msgspec.Struct, frozen=True):
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None = None
    tensor_parallel_size: Devices = 1
    data_parallel_size: Devices = 1
    pipeline_parallel_size: Devices = 1
    enable_expert_parallel: bool = False


class KvCache(msgspec.Struct, frozen=True):
    num_gpu_blocks: int | None = None
    block_size: int = 16
    enable_prefix_caching: bool = True


class SchedulerConfig(msgspec.Struct, frozen=True):
    async_scheduling: bool = True
    """The next step is planned while one runs."""
    scheduler_reserve_full_isl: bool = True
    """A waiting request must find room for all its tokens, not for its first chunk alone."""


class ModelConfig(msgspec.Struct, frozen=True):
    max_model_len: int | None = None


class ResolvedConfig(msgspec.Struct, frozen=True):
    """What the engine made of its settings. Older records lack this; what stands here are its defaults."""

    scheduler_config: SchedulerConfig = SchedulerConfig()
    model_config: ModelConfig = ModelConfig()


class RunSettings(msgspec.Struct, frozen=True):
    """What is read of `meta.json`."""

    model: str
    engine_kwargs: EngineKwargs
    kv_cache: KvCache | None = None
    resolved_config: ResolvedConfig = ResolvedConfig()

    @property
    def max_model_len(self) -> int | None:
        return self.resolved_config.model_config.max_model_len or self.engine_kwargs.max_model_len


class RecordedRun(msgspec.Struct, frozen=True, kw_only=True):
    meta: RunSettings
    asked: tuple[AskedRequest, ...]
    served: tuple[ServedRequest, ...]
    samples: tuple[Sample, ...]


def read_run(directory: Path) -> RecordedRun:
    """Raises ConfigError for anything that is not such a directory."""
    path = directory / "timeseries.csv"
    try:
        rows = list(csv.DictReader(path.read_text("utf-8-sig").splitlines())) if path.exists() else []
        samples = msgspec.convert(rows, tuple[Sample, ...], strict=False)
    except (OSError, UnicodeDecodeError, csv.Error, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return RecordedRun(
        meta=_decoded(directory / "meta.json", RunSettings),
        asked=tuple(sorted(_lines(directory / "workload.jsonl", AskedRequest), key=_arrival)),
        served=_lines(directory / "requests.jsonl", ServedRequest),
        samples=samples,
    )


def _arrival(asked: AskedRequest) -> int:
    return asked.arrival_time_ns


def _decoded(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _lines(path: Path, kind: type[T]) -> tuple[T, ...]:
    try:
        return tuple(msgspec.json.decode(line, type=kind) for line in path.read_bytes().splitlines() if line)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None
