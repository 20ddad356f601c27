"""A run as Chrome trace events, which Perfetto and chrome://tracing show.

An engine is a process: its steps are slices of one thread (`decode` where every row has one token, else
`prefill`), its requests are asynchronous slices with phases below (queued, prefill, decode), its samples are
counters. Faults are instant events. All requests have one name, under which viewers pack them together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from simulations.reports.metrics import EngineRecord, RequestRecord, RunRecord

MAX_STEPS = 100_000
MAX_REQUESTS = 20_000
MAX_SAMPLES = 50_000
MAX_FAULTS = 10_000

_TID = 1
"""Viewers take thread 0 and process 0 for the idle ones of the system."""

Event = dict[str, Any]


def chrome_trace(record: RunRecord) -> bytes:
    """The JSON of the trace, at most some 50 MB: a longer run is cut at the time at which it has too much of
    steps, requests or samples; `otherData` says so."""
    until_s = _cut_s(record)
    events = list(_events(record, until_s))
    about = {"title": record.title, "seed": str(record.seed)}
    if until_s is not None:
        about["cut"] = f"only what began in the first {until_s:g} of {record.virtual_s:g} s"
    return msgspec.json.encode({"displayTimeUnit": "ms", "otherData": about, "traceEvents": events})


def _cut_s(record: RunRecord) -> float | None:
    """From when on there would be too much; None: it all fits."""
    logs = [engine.steps for engine in record.engines if engine.steps is not None]
    cuts = []
    for times, most in (
        ([request.arrival_s for request in record.requests], MAX_REQUESTS),
        ([start_s for log in logs for start_s in log.start_s], MAX_STEPS),
        ([sample.at_s for engine in record.engines for sample in engine.samples], MAX_SAMPLES),
        ([fault.at_s for fault in record.faults], MAX_FAULTS),
    ):
        if len(times) > most:
            cuts.append(sorted(times)[most])
    return min(cuts, default=None)


def _events(record: RunRecord, until_s: float | None) -> Iterator[Event]:
    def is_shown(at_s: float) -> bool:
        return until_s is None or at_s < until_s

    pids = {engine.name: pid for pid, engine in enumerate(record.engines, 1)}
    world = len(pids) + 1
    yield {"ph": "M", "name": "process_name", "pid": world, "tid": _TID, "args": {"name": "world"}}
    for engine in record.engines:
        yield from _engine_events(engine, pids[engine.name], until_s)
    for request in record.requests:
        if is_shown(request.arrival_s):
            yield from _request_events(request, pids.get(request.engine, world), record.virtual_s)
    for fault in record.faults:
        if is_shown(fault.at_s):
            pid = pids.get(fault.target, world)
            yield {
                "ph": "i",
                "name": f"{fault.target}: {fault.text}",
                "cat": "fault",
                "s": "g" if pid == world else "p",
                "pid": pid,
                "tid": _TID,
                "ts": _us(fault.at_s),
            }


def _engine_events(engine: EngineRecord, pid: int, until_s: float | None) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": _TID, "args": {"name": engine.name}}
    yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": _TID, "args": {"name": "steps"}}
    if (steps := engine.steps) is not None:
        for start_s, end_s, num_rows, num_tokens in zip(
            steps.start_s, steps.end_s, steps.num_rows, steps.num_tokens, strict=True
        ):
            if until_s is not None and start_s >= until_s:
                break
            yield {
                "ph": "X",
                "name": "decode" if num_tokens == num_rows else "prefill",
                "cat": "step",
                "pid": pid,
                "tid": _TID,
                "ts": _us(start_s),
                "dur": _us(end_s - start_s),
                "args": {"num_rows": num_rows, "num_tokens": num_tokens},
            }
    for sample in engine.samples:
        if until_s is not None and sample.at_s >= until_s:
            break
        place = {"ph": "C", "pid": pid, "tid": _TID, "ts": _us(sample.at_s)}
        queues = {name: getattr(sample, f"num_{name}") for name in ("running", "waiting", "loading")}
        yield {**place, "name": "requests", "args": queues}
        yield {**place, "name": "KV use (%)", "args": {"share": round(100 * sample.fa_use, 2)}}


def _request_events(request: RequestRecord, pid: int, run_end_s: float) -> Iterator[Event]:
    """One slice from arrival to ending, and one per phase that there was."""
    end_s = request.ended_s if request.ended_s is not None else run_end_s
    args = {
        "index": request.index,
        "ending": request.ending or "never ended",
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_cached_tokens": request.num_cached_tokens,
        "num_output_tokens": request.num_output_tokens,
    }
    place = {"cat": "request", "id": request.index, "pid": pid, "tid": _TID}
    yield {**place, "ph": "b", "name": "request", "ts": _us(request.arrival_s), "args": args}
    borders = [request.arrival_s, request.scheduled_s, request.first_token_s]
    for index, phase in enumerate(("queued", "prefill", "decode")):
        start_s = borders[index]
        if start_s is None:
            break
        next_s = borders[index + 1] if index < 2 else None
        stop_s = end_s if next_s is None else min(next_s, end_s)
        yield {**place, "ph": "b", "name": phase, "ts": _us(start_s)}
        yield {**place, "ph": "e", "name": phase, "ts": _us(max(start_s, stop_s))}
    yield {**place, "ph": "e", "name": "request", "ts": _us(end_s)}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
