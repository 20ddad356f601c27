"""Scenarios by name, for `python -m simulations run NAME`."""

from __future__ import annotations

from pathlib import Path

from ksana.costs.step_cost import LinearStepCost
from ksana.errors import ConfigError
from simulations.engine import EngineSpec
from simulations.faults import (
    Disconnects,
    Overload,
    Poison,
    SlowMessages,
    SlowWorker,
    StartFailures,
    StoreTrouble,
    WorkerCrash,
)
from simulations.network import LinkSpec
from simulations.scenario import Scenario, StoreSpec, WorldSpec, read_scenario
from simulations.workloads.made_up import Texts
from simulations.workloads.spec import OpenSpec, SessionsSpec

_COST = LinearStepCost(fixed_s=0.012, per_token_s=6e-5, per_attended_token_s=1e-7)
"""Of the order of a model of eight billion parameters on one large GPU."""
_CHATS = Texts(
    input_tokens="lognormal:200:0.8:2000",
    output_tokens="lognormal:120:0.6:600",
    num_prefixes=20,
    prefix_tokens="512",
)
_ENGINE = EngineSpec(num_fa_blocks=4000, max_num_seqs=64, max_num_batched_tokens=1024)
_SLIDING = EngineSpec(
    num_fa_blocks=4000, num_swa_blocks=2500, sliding_window=512, max_num_seqs=64, max_num_batched_tokens=1024
)

SCENARIOS: dict[str, Scenario] = {
    "chat": Scenario(
        title="single questions with shared system prompts, one engine",
        world=WorldSpec(engines=(_ENGINE,), cost=_COST),
        workload=OpenSpec(texts=_CHATS, num_requests=600, rate_per_s=8.0),
    ),
    "conversations": Scenario(
        title="conversations of several turns, two engines chosen by prefix, sliding windows",
        world=WorldSpec(engines=(_SLIDING,), replicas=2, routing="prefix_affinity", cost=_COST),
        workload=SessionsSpec(texts=_CHATS, num_sessions=150, rate_per_s=4.0, think_s=4.0),
    ),
    "shared-store": Scenario(
        title="two engines with a remote store between them, which is in trouble now and then",
        world=WorldSpec(
            engines=(EngineSpec(num_fa_blocks=1500, num_staging_slots=256),),
            replicas=2,
            cost=_COST,
            store=StoreSpec(latency_s=0.002, bytes_per_s=2e9),
            faults=(
                StoreTrouble(at_s=15.0, engine=0, how="slow", for_s=5.0),
                StoreTrouble(at_s=25.0, engine=1, how="down", for_s=5.0),
                StoreTrouble(at_s=35.0, engine=0, how="corrupt", for_s=5.0, share=0.3),
                StoreTrouble(at_s=45.0, engine=1, how="frozen", for_s=3.0),
            ),
            fidelity="checked",
        ),
        workload=OpenSpec(texts=_CHATS, num_requests=400, rate_per_s=6.0),
    ),
    "bad-day": Scenario(
        title="three engines on which everything goes wrong that can",
        world=WorldSpec(
            engines=(_ENGINE,),
            replicas=3,
            routing="least_requests",
            cost=_COST,
            to_engines=LinkSpec(latency_s=0.02, bytes_per_s=1e7),
            faults=(
                WorkerCrash(at_s=10.0, engine=0),
                StartFailures(at_s=10.0, engine=0, count=2),
                SlowWorker(at_s=15.0, engine=1, for_s=10.0, factor=5.0),
                Overload(at_s=20.0, count=300, num_prompt_tokens=400, max_tokens=100),
                SlowMessages(at_s=25.0, engine=2, actor="scheduler", for_s=3.0, delay_s=0.02),
                Disconnects(at_s=28.0, engine=1, share=0.9),
                Poison(request=200, position=20),
            ),
        ),
        workload=OpenSpec(texts=_CHATS, num_requests=600, rate_per_s=15.0, cv=2.0),
    ),
}


def find_scenario(name: str) -> Scenario:
    """A named scenario, or the one in a file. Raises ConfigError."""
    scenario = SCENARIOS.get(name)
    if scenario is not None:
        return scenario
    path = Path(name)
    if path.suffix != ".json" and not path.exists():
        raise ConfigError(
            f"there is no scenario {name[:80]!r}; there are {', '.join(SCENARIOS)}, or a JSON file"
        )
    return read_scenario(path)
