"""The simulated device of an engine: it takes simulated time, and checks the content of every block read."""

from __future__ import annotations

from ksana.costs.step_cost import StepCost
from ksana.devices.simulated import Fault, SimulatedBackend
from ksana.devices.simulated_worker import SimulatedWorker, TokenSource
from ksana.model_setup import ModelSetup


def simulated_device(
    setup: ModelSetup, tokens: TokenSource, cost: StepCost, fault: Fault | None = None
) -> SimulatedBackend:
    """A device with the pools that `setup` decided on, which samples what `tokens` says."""
    config = setup.cache_config()
    return SimulatedBackend(
        lambda: SimulatedWorker.of_cache(config, tokens, setup.staging),
        cost=cost,
        fault=fault,
    )
