"""A run in figures: what its users felt, and what its engines did."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from simulations.reports.metrics import EngineRecord, RequestRecord, RunRecord


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. Percentiles are interpolated between the two nearest values."""

    num: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What a user wants. A request of one token has no TPOT, and meets any."""

    ttft_s: float
    tpot_s: float

    def is_met_by(self, request: RequestRecord) -> bool:
        waited_s, per_token_s = ttft_s(request), tpot_s(request)
        if not request.is_finished or waited_s is None or waited_s > self.ttft_s:
            return False
        return per_token_s is None or per_token_s <= self.tpot_s


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that met the target; those that were refused, failed or never ended did not. Clients that left
    by themselves are not counted."""

    target: Target
    share: float
    requests_per_s: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds, of requests that finished and arrived at `from_s` or later; rates per second between
    the first such arrival and the last ending. Steps, preemptions, hits and counters are of all the run."""

    title: str
    seed: int
    from_s: float
    num_requests: int
    num_finished: int
    endings: dict[str, int]
    ttft_s: Distribution | None
    """From arrival to the first token; None where no request has one, as with all that follow."""
    ttft_from_scheduled_s: Distribution | None
    queue_s: Distribution | None
    """From arrival to being scheduled."""
    tpot_s: Distribution | None
    """Mean time per output token after the first, of each request with two or more."""
    itl_s: Distribution | None
    """Every gap between two tokens; None too where token times were not kept."""
    latency_s: Distribution | None
    """From arrival to the last token."""
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    goodput: Goodput | None
    hit_rate: float | None
    """Share of looked-up prompt tokens that needed no computing; None where none was looked up."""
    num_steps: int
    num_preemptions: int
    counters: dict[str, int]
    virtual_s: float
    wall_s: float
    digest: str


def summarise(
    record: RunRecord, target: Target | None = None, from_s: float = 0.0, to_s: float = math.inf
) -> Summary:
    """The figures of a run, of requests that arrived from `from_s` on and before `to_s`."""
    asked = [request for request in record.requests if from_s <= request.arrival_s < to_s]
    finished = [request for request in asked if request.is_finished]
    span_s = _span_s(asked, record)
    counters = total_counters(record)
    return Summary(
        title=record.title,
        seed=record.seed,
        from_s=from_s,
        num_requests=len(asked),
        num_finished=len(finished),
        endings=dict(sorted(Counter(request.ending or "never ended" for request in asked).items())),
        ttft_s=distribution(values(map(ttft_s, finished))),
        ttft_from_scheduled_s=distribution(values(map(_ttft_from_scheduled_s, finished))),
        queue_s=distribution(values(map(_queue_s, finished))),
        tpot_s=distribution(values(map(tpot_s, finished))),
        itl_s=distribution(itls_s(finished)),
        latency_s=distribution(values(map(latency_s, finished))),
        requests_per_s=_rate(len(finished), span_s),
        input_tokens_per_s=_rate(sum(request.num_prompt_tokens for request in finished), span_s),
        output_tokens_per_s=_rate(sum(request.num_output_tokens for request in finished), span_s),
        goodput=_goodput(asked, target, span_s) if target is not None else None,
        hit_rate=hit_rate(record.engines),
        num_steps=counters.get("num_steps", 0),
        num_preemptions=counters.get("num_preemptions", 0),
        counters=counters,
        virtual_s=record.virtual_s,
        wall_s=record.wall_s,
        digest=record.digest,
    )


def ttft_s(request: RequestRecord) -> float | None:
    return _between(request.arrival_s, request.first_token_s)


def latency_s(request: RequestRecord) -> float | None:
    return _between(request.arrival_s, request.last_token_s)


def tpot_s(request: RequestRecord) -> float | None:
    decoding_s = _between(request.first_token_s, request.last_token_s)
    if decoding_s is None or request.num_output_tokens < 2:
        return None
    return decoding_s / (request.num_output_tokens - 1)


def _ttft_from_scheduled_s(request: RequestRecord) -> float | None:
    return _between(request.scheduled_s, request.first_token_s)


def _queue_s(request: RequestRecord) -> float | None:
    return _between(request.arrival_s, request.scheduled_s)


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s


def values(times: Iterable[float | None]) -> NDArray[np.float64]:
    """Those that are."""
    return np.array([time for time in times if time is not None], dtype=np.float64)


def itls_s(requests: Iterable[RequestRecord]) -> NDArray[np.float64]:
    """Every gap between two tokens, in no particular order."""
    kept = [np.asarray(request.token_times_s) for request in requests if request.token_times_s is not None]
    return np.concatenate([np.diff(times) for times in kept]) if kept else np.empty(0)


def distribution(times: NDArray[np.float64]) -> Distribution | None:
    if not len(times):
        return None
    p50, p90, p99 = np.percentile(times, (50, 90, 99)).tolist()
    return Distribution(
        num=len(times), mean=float(times.mean()), p50=p50, p90=p90, p99=p99, max=float(times.max())
    )


def hit_rate(engines: Sequence[EngineRecord]) -> float | None:
    last = [engine.samples[-1] for engine in engines if engine.samples]
    queried = sum(sample.num_queried_tokens for sample in last)
    return sum(sample.num_hit_tokens for sample in last) / queried if queried else None


def total_counters(record: RunRecord) -> dict[str, int]:
    """By name, over all engines and the world."""
    totals: Counter[str] = Counter(record.counters)
    for engine in record.engines:
        totals.update(engine.counters)
    return dict(sorted(totals.items()))


def as_json(value: Any) -> bytes:
    """Readable JSON of anything made of structs; what is none (NaN) is null."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2)


def _goodput(asked: Sequence[RequestRecord], target: Target, span_s: float) -> Goodput:
    counted = [request for request in asked if request.ending != "left"]
    num_good = sum(map(target.is_met_by, counted))
    return Goodput(
        target=target,
        share=num_good / len(counted) if counted else 0.0,
        requests_per_s=_rate(num_good, span_s),
    )


def _span_s(asked: Sequence[RequestRecord], record: RunRecord) -> float:
    if not asked:
        return 0.0
    ends = [request.ended_s if request.ended_s is not None else record.virtual_s for request in asked]
    return max(ends) - min(request.arrival_s for request in asked)


def _rate(num: int, span_s: float) -> float:
    return num / span_s if span_s > 0 else 0.0
