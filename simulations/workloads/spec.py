"""Which workload a run has, as scenarios and command lines say it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from ksana.errors import ConfigError
from simulations.requests import OpenLoop, SimRequest, Workload
from simulations.workloads.lengths import parse_lengths
from simulations.workloads.made_up import ClosedLoop, Sessions, Texts, open_requests
from simulations.workloads.trace_files import read_trace

_MOST = 10_000_000


class OpenSpec(msgspec.Struct, frozen=True, kw_only=True, tag="open", forbid_unknown_fields=True):
    """Arrivals at a rate, as bursty as `cv` says: 1 is a Poisson process, 0 a metronome, above 1 bursts."""

    texts: Texts = Texts()
    num_requests: int = 200
    rate_per_s: float = 1.0
    cv: float = 1.0

    def __post_init__(self) -> None:
        _whole("num_requests", self.num_requests, 1)
        _positive("rate_per_s", self.rate_per_s)
        _not_negative("cv", self.cv)


class ClosedSpec(msgspec.Struct, frozen=True, kw_only=True, tag="closed", forbid_unknown_fields=True):
    """Users who wait for their answers."""

    texts: Texts = Texts()
    num_users: int = 16
    num_requests: int = 200
    think_s: float = 0.0

    def __post_init__(self) -> None:
        _whole("num_users", self.num_users, 1)
        _whole("num_requests", self.num_requests, 1)
        _not_negative("think_s", self.think_s)


class SessionsSpec(msgspec.Struct, frozen=True, kw_only=True, tag="sessions", forbid_unknown_fields=True):
    """Conversations of several turns; `texts.input_tokens` is what a user says in one turn."""

    texts: Texts = Texts()
    num_sessions: int = 50
    rate_per_s: float = 1.0
    """Conversations that begin per second."""
    turns: str = "uniform:1:6"
    think_s: float = 10.0
    max_prompt_tokens: int = 32_768

    def __post_init__(self) -> None:
        _whole("num_sessions", self.num_sessions, 1)
        _positive("rate_per_s", self.rate_per_s)
        parse_lengths(self.turns)
        _not_negative("think_s", self.think_s)
        _whole("max_prompt_tokens", self.max_prompt_tokens, 1)


class TraceSpec(msgspec.Struct, frozen=True, kw_only=True, tag="trace", forbid_unknown_fields=True):
    """A recorded workload: a Mooncake trace, an Azure CSV, a `workload.jsonl` or a journal's directory."""

    path: str
    limit: int | None = None
    """Only so many requests."""
    speedup: float = 1.0
    """Arrivals come so many times faster than recorded."""

    def __post_init__(self) -> None:
        if self.limit is not None:
            _whole("limit", self.limit, 1)
        _positive("speedup", self.speedup)


WorkloadSpec = OpenSpec | ClosedSpec | SessionsSpec | TraceSpec


def open_workload(spec: WorkloadSpec, seed: int) -> Workload:
    """The workload, from its beginning; equal specs and seeds ask the same. Raises ConfigError: the file
    cannot be read, or (later, when it is read on) a line of it is wrong."""
    match spec:
        case OpenSpec():
            return OpenLoop(open_requests(seed, spec.texts, spec.num_requests, spec.rate_per_s, spec.cv))
        case ClosedSpec():
            return ClosedLoop(
                seed,
                spec.texts,
                num_users=spec.num_users,
                num_requests=spec.num_requests,
                think_s=spec.think_s,
            )
        case SessionsSpec():
            return Sessions(
                seed,
                spec.texts,
                num_sessions=spec.num_sessions,
                rate_per_s=spec.rate_per_s,
                turns=parse_lengths(spec.turns),
                think_s=spec.think_s,
                max_prompt_tokens=spec.max_prompt_tokens,
            )
        case TraceSpec():
            requests = read_trace(Path(spec.path))
            if spec.limit is not None:
                requests = islice(requests, spec.limit)
            return OpenLoop(_sped_up(requests, spec.speedup))


def _sped_up(requests: Iterator[SimRequest], speedup: float) -> Iterator[SimRequest]:
    if speedup == 1:
        return requests
    return (msgspec.structs.replace(request, arrival_s=request.arrival_s / speedup) for request in requests)


def _whole(name: str, value: int, least: int) -> None:
    if not least <= value <= _MOST:
        raise ConfigError(f"{name} goes from {least} to {_MOST:,}, not {value}")


def _positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{name} must be a positive number, not {value:g}")


def _not_negative(name: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise ConfigError(f"{name} must be a number that is not negative, not {value:g}")
