"""Records of runs that never were."""

from __future__ import annotations

from array import array

from simulations.reports.metrics import (
    EngineRecord,
    EngineSample,
    FaultRecord,
    RequestRecord,
    RunRecord,
    StepLog,
)


def made_up_run(
    title: str = "made up", num_requests: int = 40, num_engines: int = 2, slowness: float = 1.0
) -> RunRecord:
    """One request per second, each with 5 tokens; the last of them fails. The engines take turns."""
    names = [f"engine {index}" for index in range(num_engines)]
    record = RunRecord(
        title=title, seed=3, settings={"a": "<b>"}, virtual_s=float(num_requests + 10), digest="0" * 64
    )
    for index in range(num_requests):
        times = array("d", [index + slowness * (0.1 * k + 0.2) for k in range(5)])
        record.requests.append(
            RequestRecord(
                index=index,
                engine=names[index % num_engines],
                arrival_s=float(index),
                num_prompt_tokens=10,
                scheduled_s=index + 0.1,
                first_token_s=times[0],
                last_token_s=times[-1],
                ended_s=times[-1],
                ending="finished length",
                num_output_tokens=5,
                token_times_s=times,
            )
        )
    record.requests[-1].ending = "failed 504"
    for name in names:
        samples = [
            EngineSample(
                at_s=float(k),
                num_running=k % 3,
                num_waiting=k % 2,
                fa_use=0.5,
                num_queried_tokens=10 * k,
                num_hit_tokens=4 * k,
            )
            for k in range(num_requests)
        ]
        steps = StepLog()
        for k in range(num_requests):
            steps.append(k + 0.1, k + 0.3, 2, 64)
        counters = {"num_steps": num_requests, "num_preemptions": 1}
        record.engines.append(EngineRecord(name=name, samples=samples, steps=steps, counters=counters))
    record.faults = [
        FaultRecord(at_s=5.0, target=names[0], text="<crash>"),
        FaultRecord(at_s=6.0, target="store", text="down"),
    ]
    return record
