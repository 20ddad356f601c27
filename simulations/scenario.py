"""A world on paper: engines, store, links, clients and faults, as JSON that people and the swarm write."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import msgspec

from ksana.costs.step_cost import LinearStepCost
from ksana.errors import ConfigError
from ksana.input_file import read_input
from simulations.engine import EngineSpec
from simulations.faults import BadRow, Fault, OnMessage, Overload, Poison, StartFailures, engines_named
from simulations.network import LinkSpec
from simulations.requests import MAX_CONTENT_ID, NamedText, OpenLoop, SimRequest, Workload
from simulations.routing import Routing
from simulations.workloads.spec import WorkloadSpec, open_workload

MAX_ENGINES = 256
MAX_LISTED_REQUESTS = 100_000
MAX_FAULTS = 10_000
MAX_FILE_BYTES = 64 << 20
MAX_SCENARIO_BLOCKS = 1 << 24
"""KV blocks of all engines together: some 500 bytes of memory each."""

Fidelity = Literal["checked", "fast"]
"""checked: the worker keeps a number per token in its pools and checks every block it reads. fast: it does
not, which is several times faster."""


class StoreSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The remote store that all engines share, each over a link of its own."""

    latency_s: float = 0.001
    jitter: float = 0.2
    bytes_per_s: float = 1e9


class WorldSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything but who asks what."""

    engines: tuple[EngineSpec, ...] = (EngineSpec(),)
    replicas: int = 1
    """So many of each engine."""
    routing: Routing = "round_robin"
    cost: LinearStepCost = LinearStepCost()
    """Unless the run is given a cost model."""
    store: StoreSpec | None = None
    to_engines: LinkSpec = LinkSpec()
    """From clients to engines, one link each. What comes back takes the same latency."""
    faults: tuple[Fault, ...] = ()
    fidelity: Fidelity = "fast"
    sample_every_s: float = 1.0
    """Between samples of running, waiting and KV use; 0: none."""
    until_s: float = 1e7
    """When everything must be over."""

    @property
    def all_engines(self) -> tuple[EngineSpec, ...]:
        return self.engines * self.replicas

    def check(self) -> None:
        """Raises ConfigError for what could never run or would fill the memory."""
        num_engines = len(self.engines) * self.replicas
        if not (1 <= num_engines <= MAX_ENGINES):
            raise ConfigError(f"a world has 1 to {MAX_ENGINES} engines, not {num_engines}")
        if len(self.faults) > MAX_FAULTS:
            raise ConfigError(f"{len(self.faults)} faults are more than {MAX_FAULTS}")
        num_blocks = sum(engine.num_fa_blocks + engine.num_swa_blocks for engine in self.engines)
        if num_blocks * self.replicas > MAX_SCENARIO_BLOCKS:
            raise ConfigError(f"more than {MAX_SCENARIO_BLOCKS:,} KV blocks in all")
        if self.store is not None and not (self.store.bytes_per_s > 0 and self.store.jitter <= 1):
            raise ConfigError("a store needs bytes_per_s above 0, and a jitter of 0 to 1")
        for engine in self.engines:
            check_engine(engine)
        for number in _times(self):
            if not (math.isfinite(number) and number >= 0):
                raise ConfigError(f"a time, rate or share in the scenario is {number}")
        for fault in self.faults:
            engine_index = engines_named(fault)
            if engine_index is not None and not 0 <= engine_index < num_engines:
                raise ConfigError(f"a fault hits engine {engine_index}, but there are {num_engines}")
            if isinstance(fault, Overload) and not (
                0 <= fault.count <= MAX_LISTED_REQUESTS
                and 1 <= fault.num_prompt_tokens <= 1 << 20
                and 1 <= fault.max_tokens <= 1 << 20
            ):
                raise ConfigError("an overload of too many or impossible requests")
            if isinstance(fault, StartFailures) and not 0 <= fault.count <= 1000:
                raise ConfigError(f"start_failures: a count of {fault.count}")
            if isinstance(fault, OnMessage) and not (1 <= fault.nth <= 1 << 30 and len(fault.message) < 100):
                raise ConfigError("on_message: the nth message of a kind, counted from 1")
            if isinstance(fault, BadRow | Poison) and (fault.request < 0 or fault.position < 0):
                raise ConfigError("a fault of a request before the first, or of a token before the first")


def _times(spec: WorldSpec) -> list[float]:
    links = [spec.to_engines.latency_s, spec.to_engines.bytes_per_s]
    stores = [] if spec.store is None else [spec.store.latency_s, spec.store.jitter, spec.store.bytes_per_s]
    costs = [spec.cost.fixed_s, spec.cost.per_token_s, spec.cost.per_attended_token_s]
    faults = [
        float(value)
        for fault in spec.faults
        for name in fault.__struct_fields__
        if isinstance(value := getattr(fault, name), float)
    ]
    engines = [
        time for e in spec.engines for time in (e.remote_load_timeout_s, e.start_time_s, e.step_timeout_s)
    ]
    return [*links, *stores, *costs, *faults, *engines, spec.sample_every_s, spec.until_s]


def check_engine(engine: EngineSpec) -> None:
    """Raises ConfigError for sizes that `ksana serve` would not have decided on."""
    positive = {
        name: getattr(engine, name)
        for name in ("block_size", "num_fa_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
    }
    for name, value in positive.items():
        if value < 1:
            raise ConfigError(f"{name} must be positive, not {value}")
    if engine.max_queued_requests < 0 or engine.max_remote_loads < 0:
        raise ConfigError("a negative number of requests or loads")
    if not 4 <= engine.num_staging_slots <= 1 << 16:
        raise ConfigError(f"num_staging_slots goes from 4 to {1 << 16}, not {engine.num_staging_slots}")
    if engine.block_size > 1 << 16 or engine.num_slots > 1 << 24:
        raise ConfigError("block_size or max_queued_requests is larger than any that makes sense")
    if engine.sliding_window is None:
        return
    if engine.sliding_window < 1:
        raise ConfigError(f"sliding_window must be positive, not {engine.sliding_window}")
    needed = least_swa_blocks(engine)
    if engine.num_swa_blocks < needed:
        raise ConfigError(
            f"{engine.num_swa_blocks} SWA blocks are too few: a window, "
            f"{'two chunks' if engine.plan_ahead else 'a chunk'} and a block are {needed}"
        )


def least_swa_blocks(engine: EngineSpec) -> int:
    """What one request at most needs at once, as `ksana.cache.pool_sizes` counts it."""
    size, chunks = engine.block_size, 2 if engine.plan_ahead else 1
    window = -(-(engine.sliding_window or 0) // size)
    peak = window + chunks * -(-engine.max_num_batched_tokens // size) + 1
    return min(peak, -(-max(1, engine.max_model_len - 1) // size))


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A world and the requests in it."""

    title: str = ""
    world: WorldSpec = WorldSpec()
    seed: int = 0
    requests: tuple[SimRequest, ...] = ()
    """By arrival."""
    workload: WorkloadSpec | None = None
    """Instead of listed requests."""

    def check(self) -> None:
        """Raises ConfigError."""
        self.world.check()
        if self.requests and self.workload is not None:
            raise ConfigError("a scenario has listed requests or a workload, not both")
        if len(self.requests) > MAX_LISTED_REQUESTS:
            raise ConfigError(f"{len(self.requests)} listed requests are more than {MAX_LISTED_REQUESTS}")
        last_s = 0.0
        for index, request in enumerate(self.requests):
            check_request(request, f"request {index}")
            if request.arrival_s < last_s:
                raise ConfigError(f"request {index} arrives before the one in front of it")
            last_s = request.arrival_s

    def open_workload(self, seed: int) -> Workload:
        """From its beginning. Raises ConfigError."""
        if self.workload is not None:
            return open_workload(self.workload, seed)
        return OpenLoop(iter(self.requests))


def check_request(request: SimRequest, name: str) -> None:
    """Raises ConfigError for what no client could ask."""
    if not (math.isfinite(request.arrival_s) and request.arrival_s >= 0):
        raise ConfigError(f"{name} arrives at {request.arrival_s}")
    if not request.timeout_s > 0:
        raise ConfigError(f"{name} has a timeout of {request.timeout_s}")
    if not 1 <= request.prompt.num_tokens <= 1 << 22 or not 1 <= request.max_tokens <= 1 << 22:
        raise ConfigError(
            f"{name} has {request.prompt.num_tokens} prompt tokens and max_tokens {request.max_tokens}"
        )
    for part in request.prompt.parts:
        if isinstance(part, NamedText):
            is_wrong = not 0 <= part.content_id <= MAX_CONTENT_ID or part.num_tokens < 0
        else:
            is_wrong = not all(0 <= token_id < 1 << 31 for token_id in part.token_ids)
        if is_wrong:
            raise ConfigError(f"{name}: a part of its prompt is impossible: {str(part)[:80]}")


def read_scenario(path: Path) -> Scenario:
    """Raises ConfigError, with the file, for what is none."""
    text = read_input(path, MAX_FILE_BYTES)
    try:
        scenario = msgspec.json.decode(text, type=Scenario)
        scenario.check()
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return scenario
