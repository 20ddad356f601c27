"""One trial of a capacity search: a workload at a rate, and whether its users got what they want."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec
import numpy as np

from ksana.errors import ConfigError
from simulations.costed import CostChoice, run_costed
from simulations.keep import Keep
from simulations.reports.metrics import RequestRecord, RunRecord
from simulations.reports.summary import Target, tpot_s, ttft_s, values
from simulations.requests import Ending, SimRequest, Workload
from simulations.scenario import WorldSpec
from simulations.workloads.spec import OpenSpec, TraceSpec, open_workload

_FLOOD_PER_S = 1e6
_LEFT_OUT = 0.1
"""Share of the arrivals at either end of a trial that are not judged: the engine is filling or emptying."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests per second does this world serve such that `percentile` percent of them are within
    the target, in TTFT and in TPOT?"""

    world: WorldSpec
    workload: OpenSpec | TraceSpec
    target: Target
    percentile: float = 99.0
    cost: CostChoice | None = None
    """None: the world's own."""


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What one trial gave. Times are at the percentile that is asked for; None: no request had one."""

    rate_per_s: float
    seed: int
    num_judged: int
    num_failed: int
    """Of those judged."""
    failures: dict[str, int]
    """How they ended: `failed 504`, `refused 429`, ..."""
    ttft_s: float | None
    tpot_s: float | None
    num_extrapolated: int
    """Steps beyond what the cost model was made from."""
    wall_s: float
    broken: tuple[str, ...]
    """What was not as wanted: `failures`, `TTFT`, `TPOT`. Empty: the target holds."""

    @property
    def holds(self) -> bool:
        return not self.broken


def probe(question: Question, rate_per_s: float, seed: int) -> Probe:
    """Run the workload with as many arrivals per second on average. Raises ConfigError for a wrong trace."""
    spec = at_rate(question.workload, rate_per_s, seed)
    record = _run(question, open_workload(spec, seed), seed)
    num = len(record.requests)
    left_out = min(int(num * _LEFT_OUT), (num - 1) // 2)
    return _judge(question, record, record.requests[left_out : num - left_out], rate_per_s)


def probe_alone(question: Question, num_requests: int = 20) -> Probe:
    """The first requests one by one, each when the one before it has ended."""
    workload = OneByOne(open_workload(question.workload, 0).first(), num_requests)
    record = _run(question, workload, 0)
    return _judge(question, record, record.requests, _served_per_s(record))


def probe_flood(question: Question, seed: int) -> Probe:
    """All requests at nearly the same time; its rate is what was served per second. More cannot be served for
    long, and finding this out takes few steps, as all of them are full."""
    record = _run(question, open_workload(at_rate(question.workload, _FLOOD_PER_S, seed), seed), seed)
    return _judge(question, record, record.requests, _served_per_s(record))


def _served_per_s(record: RunRecord) -> float:
    num = sum(request.is_finished for request in record.requests)
    ends_s = [request.ended_s for request in record.requests if request.ended_s is not None]
    span_s = max(ends_s, default=0.0) - min(request.arrival_s for request in record.requests)
    return num / span_s if span_s > 0 else 0.0


def at_rate(spec: OpenSpec | TraceSpec, rate_per_s: float, seed: int) -> OpenSpec | TraceSpec:
    """The same requests in the same rhythm, with exactly so many arrivals per second on average."""
    arrivals_s = [request.arrival_s for request in open_workload(spec, seed).first()]
    span_s = arrivals_s[-1] - arrivals_s[0] if arrivals_s else 0.0
    if span_s <= 0:
        raise ConfigError("a capacity search needs requests that arrive at two times at least")
    factor = rate_per_s * span_s / (len(arrivals_s) - 1)
    if isinstance(spec, TraceSpec):
        return msgspec.structs.replace(spec, speedup=spec.speedup * factor)
    return msgspec.structs.replace(spec, rate_per_s=spec.rate_per_s * factor)


class OneByOne(Workload):
    """The first `num` of these requests, none before the last one ended."""

    def __init__(self, requests: Iterator[SimRequest], num: int) -> None:
        self._requests = requests
        self._num_left = num

    def first(self) -> Iterator[SimRequest]:
        request = self._next(0.0)
        if request is not None:
            yield request

    def after(self, ending: Ending) -> SimRequest | None:
        return self._next(ending.at_s)

    def _next(self, at_s: float) -> SimRequest | None:
        request = next(self._requests, None) if self._num_left else None
        self._num_left -= 1
        return None if request is None else msgspec.structs.replace(request, arrival_s=at_s)


def _run(question: Question, workload: Workload, seed: int) -> RunRecord:
    world = msgspec.structs.replace(question.world, sample_every_s=0.0)
    return run_costed(world, workload, question.cost, seed=seed, keep=Keep(check_answers=False))


def _judge(question: Question, record: RunRecord, judged: list[RequestRecord], rate_per_s: float) -> Probe:
    finished = [request for request in judged if request.is_finished]
    times = {
        "TTFT": (_percentile(values(map(ttft_s, finished)), question), question.target.ttft_s),
        "TPOT": (_percentile(values(map(tpot_s, finished)), question), question.target.tpot_s),
    }
    failures = Counter(request.ending for request in judged if not request.is_finished)
    num_failed = failures.total()
    broken = [name for name, (time_s, most_s) in times.items() if time_s is not None and time_s > most_s]
    is_failing = num_failed > len(judged) * (1 - question.percentile / 100)
    return Probe(
        rate_per_s=rate_per_s,
        seed=record.seed,
        num_judged=len(judged),
        num_failed=num_failed,
        failures=dict(sorted(failures.items())),
        ttft_s=times["TTFT"][0],
        tpot_s=times["TPOT"][0],
        num_extrapolated=record.counters.get("num_extrapolated", 0),
        wall_s=record.wall_s,
        broken=("failures", *broken) if is_failing else tuple(broken),
    )


def _percentile(times: np.typing.NDArray[np.float64], question: Question) -> float | None:
    return float(np.percentile(times, question.percentile)) if len(times) else None
