"""Makes a scenario that fails as small as it can be while it fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from ksana.costs.step_cost import LinearStepCost
from ksana.errors import ConfigError
from simulations.engine import EngineSpec
from simulations.faults import BadRow, Fault, Poison
from simulations.requests import NamedText, PromptSource, SimRequest
from simulations.scenario import Scenario, WorldSpec
from simulations.swarm.swarm import REAL_S_PER_WORLD, Failure, try_scenario

MAX_TRIES = 300

T = TypeVar("T")

_PLAIN_ENGINE = EngineSpec(
    max_queued_requests=100, num_staging_slots=32, start_time_s=0.05, step_timeout_s=20.0
)
"""What settings go back to. Sizes of pools stay what they are, as tightness is often the point."""
_SIZES = {"num_fa_blocks", "num_swa_blocks", "max_model_len"}
_PLAIN_WORLD = WorldSpec(cost=LinearStepCost(fixed_s=0.01, per_token_s=0.0, per_attended_token_s=0.0))
_WORLD_FIELDS = ("replicas", "routing", "cost", "store", "to_engines")
_REQUEST_FIELDS = (
    "num_output_tokens", "min_tokens", "ignore_eos", "stop_token_id", "seed", "cache_salt", "leaves_after",
    "stop_after",
)  # fmt: skip


def shrink(
    scenario: Scenario,
    failure: Failure,
    *,
    max_tries: int = MAX_TRIES,
    run: Callable[[Scenario], Failure | None] | None = None,
) -> Scenario:
    """The smallest scenario found that the same checker notices something in. Faults go first, then requests,
    then settings go back to what they usually are, then requests get simpler."""
    shrinker = _Shrinker(scenario, failure, max_tries, run or _run)
    for _ in range(3):
        before = shrinker.best
        shrinker.drop_faults()
        shrinker.drop_requests()
        shrinker.reset_settings()
        shrinker.simplify_requests()
        if shrinker.best == before:
            break
    return shrinker.best


def _run(scenario: Scenario) -> Failure | None:
    return try_scenario(scenario, REAL_S_PER_WORLD)


class _Shrinker:
    def __init__(
        self,
        scenario: Scenario,
        failure: Failure,
        max_tries: int,
        run: Callable[[Scenario], Failure | None],
    ) -> None:
        self.best = scenario
        self._checker = failure.checker
        self._tries_left = max_tries
        self._run = run

    def _try(self, scenario: Scenario) -> bool:
        """Take a scenario if it fails in the same way."""
        if self._tries_left <= 0 or scenario == self.best:
            return False
        self._tries_left -= 1
        try:
            scenario.check()
            failure = self._run(scenario)
        except ConfigError:
            return False
        if failure is None or failure.checker != self._checker:
            return False
        self.best = scenario
        return True

    def drop_faults(self) -> None:
        for faults in _shorter(lambda: self.best.world.faults):
            self._try(_with_world(self.best, faults=faults))

    def drop_requests(self) -> None:
        for kept in _shorter(lambda: tuple(range(len(self.best.requests)))):
            requests = tuple(self.best.requests[index] for index in kept)
            faults = _renumbered(self.best.world.faults, kept)
            self._try(msgspec.structs.replace(_with_world(self.best, faults=faults), requests=requests))

    def reset_settings(self) -> None:
        for name in _WORLD_FIELDS:
            self._try(_with_world(self.best, **{name: getattr(_PLAIN_WORLD, name)}))
        for name in EngineSpec.__struct_fields__:
            if name not in _SIZES:
                self._try_engines(name, getattr(_PLAIN_ENGINE, name))

    def _try_engines(self, name: str, value: Any) -> None:
        engines = tuple(
            msgspec.structs.replace(engine, **{name: value}) for engine in self.best.world.engines
        )
        self._try(_with_world(self.best, engines=engines))

    def simplify_requests(self) -> None:
        for index in range(len(self.best.requests)):
            for simpler in _simpler(self.best.requests[index]):
                requests = list(self.best.requests)
                requests[index] = simpler(requests[index])
                self._try(msgspec.structs.replace(self.best, requests=tuple(requests)))


def _with_world(scenario: Scenario, **changes: Any) -> Scenario:
    return msgspec.structs.replace(scenario, world=msgspec.structs.replace(scenario.world, **changes))


def _shorter(current: Callable[[], Sequence[T]]) -> Iterator[tuple[T, ...]]:
    """`current()` without one half of it, one quarter, and so on down to single items. The caller makes those
    current that it likes."""
    num_parts = 1
    while True:
        items = current()
        if not items:
            return
        num_parts = min(num_parts, len(items))
        size = -(-len(items) // num_parts)
        start = 0
        while start < len(items):
            candidate = (*items[:start], *items[start + size :])
            yield candidate
            after = current()
            if len(after) == len(items):
                start += size
            items = after
        if size == 1:
            return
        num_parts *= 2


def _renumbered(faults: tuple[Fault, ...], kept: Sequence[int]) -> tuple[Fault, ...]:
    """The faults, when only these requests are left."""
    places = {old: new for new, old in enumerate(kept)}
    left: list[Fault] = []
    for fault in faults:
        if not isinstance(fault, BadRow | Poison):
            left.append(fault)
        elif fault.request in places:
            left.append(msgspec.structs.replace(fault, request=places[fault.request]))
    return tuple(left)


def _simpler(request: SimRequest) -> list[Callable[[SimRequest], SimRequest]]:
    """Changes that make a request simpler; each begins with the request as it is then."""
    unusual = [name for name in _REQUEST_FIELDS if getattr(request, name) != _PLAIN_REQUEST_FIELDS[name]]
    return [*map(_with_plain, unusual), _fewer_tokens, _shorter_prompt]


def _with_plain(name: str) -> Callable[[SimRequest], SimRequest]:
    return lambda request: msgspec.structs.replace(request, **{name: _PLAIN_REQUEST_FIELDS[name]})


_PLAIN_REQUEST_FIELDS: dict[str, Any] = {
    name: getattr(SimRequest(arrival_s=0.0, prompt=PromptSource(()), max_tokens=1), name)
    for name in _REQUEST_FIELDS
}


def _fewer_tokens(request: SimRequest) -> SimRequest:
    return msgspec.structs.replace(request, max_tokens=max(1, request.max_tokens // 2))


def _shorter_prompt(request: SimRequest) -> SimRequest:
    """Half of the last part."""
    *parts, last = request.prompt.parts
    if not isinstance(last, NamedText) or last.num_tokens < 2:
        return request
    half = NamedText(last.content_id, last.num_tokens // 2)
    return msgspec.structs.replace(request, prompt=PromptSource((*parts, half)))
