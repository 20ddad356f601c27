"""Small worlds for tests."""

from __future__ import annotations

from collections.abc import Sequence

from ksana.costs.step_cost import LinearStepCost
from simulations.engine import EngineSpec
from simulations.faults import Fault
from simulations.keep import Keep
from simulations.network import LinkSpec
from simulations.reports.metrics import RunRecord
from simulations.requests import NamedText, OpenLoop, PromptSource, SimRequest
from simulations.routing import Routing
from simulations.scenario import Fidelity, StoreSpec, WorldSpec
from simulations.world import run_world

STEP_S = 0.01
ENGINE = EngineSpec(
    block_size=4,
    num_fa_blocks=200,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=256,
    start_time_s=0.5,
)


def request(
    at_s: float = 0.0, text: int = 0, prompt: int = 10, max_tokens: int = 5, **more: object
) -> SimRequest:
    return SimRequest(
        arrival_s=at_s,
        prompt=PromptSource((NamedText(text, prompt),)),
        max_tokens=max_tokens,
        **more,  # type: ignore[arg-type]
    )


def world(
    *faults: Fault,
    engine: EngineSpec = ENGINE,
    replicas: int = 1,
    store: StoreSpec | None = None,
    link: LinkSpec | None = None,
    fidelity: Fidelity = "checked",
    routing: Routing = "round_robin",
) -> WorldSpec:
    return WorldSpec(
        engines=(engine,),
        replicas=replicas,
        routing=routing,
        cost=LinearStepCost(fixed_s=STEP_S, per_token_s=0.0, per_attended_token_s=0.0),
        store=store,
        to_engines=link or LinkSpec(),
        faults=faults,
        fidelity=fidelity,
        sample_every_s=0.0,
    )


def ran(spec: WorldSpec, requests: Sequence[SimRequest], seed: int = 0, **keep: bool) -> RunRecord:
    return run_world(spec, OpenLoop(iter(requests)), seed=seed, keep=Keep(**({"check_cache": True} | keep)))


def endings(record: RunRecord) -> list[str]:
    return [asked.ending for asked in record.requests]
