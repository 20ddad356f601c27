"""A world: engines, the store they share, links, clients, faults and checkers on one seeded virtual clock.

    record = run_world(WorldSpec(engines=(EngineSpec(),)), OpenLoop(iter(requests)), seed=1)

No threads, no wall time, no torch. The same spec, workload and seed give the same messages, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import trio

from ksana.costs.step_cost import StepCost
from ksana.messages.base import Message
from ksana.runtime.clock import now_s
from ksana.runtime.deterministic import run_deterministic
from ksana.runtime.virtual_clock import VirtualClock
from simulations.agenda import Agenda
from simulations.checks.oracles import StoreOracle
from simulations.checks.promises import BrokenPromise, NotOver
from simulations.engine import STORE_IDENTITY
from simulations.faults import (
    BadRow,
    Fault,
    FaultHand,
    OnMessage,
    Poison,
    engines_named,
)
from simulations.frontend import Asked
from simulations.keep import Keep
from simulations.machine import Machine
from simulations.reports.metrics import FaultRecord, RequestRecord, RunRecord
from simulations.requests import Ending, SimRequest, Workload
from simulations.routing import Router
from simulations.scenario import WorldSpec
from simulations.world_log import WorldLog

_SETTLE_WITHIN_S = 300.0
"""After the last ending: write-backs end, at the latest at the store's deadline; lost workers come back."""


CHECK_ALL = Keep(digest=True, check_cache=True)


def run_world(
    spec: WorldSpec,
    workload: Workload,
    *,
    seed: int = 0,
    cost: StepCost | None = None,
    host_s: float = 0.0,
    keep: Keep | None = None,
    title: str = "",
) -> RunRecord:
    """Run it to its end. `cost` instead of the spec's. `host_s`: what an engine needs from a step's end to
    the begin of the next, where that was not planned ahead.

    Raises ConfigError for an impossible spec, and InvariantViolated (or what else an actor raised) when a
    promise is broken.
    """
    spec.check()

    async def main() -> RunRecord:
        world = _World(spec, workload, seed, cost or spec.cost, host_s, keep or Keep())
        return await world.run(title)

    try:
        return run_deterministic(seed, main, VirtualClock())
    except (BaseExceptionGroup, trio.TrioInternalError) as error:
        raise first_error(error) from None


def first_error(error: BaseException) -> BaseException:
    """The first exception in a group of groups, or what made the event loop itself stop."""
    while isinstance(error, BaseExceptionGroup | trio.TrioInternalError):
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif error.__cause__ is not None:
            error = error.__cause__
        else:
            break
    return error


class _World:
    def __init__(
        self, spec: WorldSpec, workload: Workload, seed: int, cost: StepCost, host_s: float, keep: Keep
    ) -> None:
        self.spec = spec
        self.seed = seed
        self.cost = cost
        self.host_s = host_s
        self.keep = keep
        self.agenda = Agenda()
        self.log = WorldLog() if keep.digest else None
        self.stored: dict[bytes, bytes] = {}
        self.requests: list[RequestRecord] = []
        self.faults: list[FaultRecord] = []
        self._store_oracles: dict[int, StoreOracle] = {}
        self.machines = [Machine(self, index, engine) for index, engine in enumerate(spec.all_engines)]
        self._router = Router(spec.routing, [machine.front for machine in self.machines])
        self._workload = workload
        self._row_faults = {f.request: f for f in spec.faults if isinstance(f, BadRow | Poison)}
        self._num_open = 0
        """Requests that will come or have not ended."""
        self._all_came = False
        self._over = trio.Event()
        self._hand = FaultHand(
            self.agenda,
            self.machines,
            ask=self._ask,
            told=self._fault_came,
            all_came=self._look_whether_over,
            seed=seed,
        )

    async def run(self, title: str) -> RunRecord:
        began_s = time.perf_counter()  # for the report only
        self._hand.plan(self.spec.faults)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.agenda.run)
            for machine in self.machines:
                nursery.start_soon(machine.engine.run)
                nursery.start_soon(machine.watch.watch)
            if self.spec.sample_every_s:
                nursery.start_soon(self._sample)
            self._await_next(self._workload.first())
            with trio.move_on_at(self.spec.until_s) as scope:
                await self._over.wait()
            if scope.cancelled_caught:
                raise NotOver(f"{self._num_open} requests had not ended after {self.spec.until_s} s")
            over_s = now_s()
            await self._settle()
            nursery.cancel_scope.cancel()
        return self._report(title, over_s, time.perf_counter() - began_s)

    # Clients

    def _await_next(self, requests: Iterator[SimRequest]) -> None:
        """Enter the next request into the agenda; the one after it when that has come."""
        request = next(requests, None)
        if request is None:
            self._all_came = True
            self._look_whether_over()
            return
        self._num_open += 1

        def come() -> None:
            self._ask_counted(request)
            self._await_next(requests)

        self.agenda.at(request.arrival_s, come)

    def _ask(self, request: SimRequest) -> None:
        """A request that comes now."""
        self._num_open += 1
        self._ask_counted(request)

    def _ask_counted(self, request: SimRequest) -> None:
        index = len(self.requests)
        front = self.machines[self._router.choose(request)].front
        record = front.new_record(request, index)
        record.arrival_s = now_s()
        self.requests.append(record)
        asked = Asked(request, record, seed=index + 1)
        fault = self._row_faults.get(index)
        if isinstance(fault, BadRow):
            asked.error_at = fault.position
        elif fault is not None:
            asked.poison_at = fault.position
        front.ask(asked)

    def take_ending(self, ending: Ending) -> None:
        follows = self._workload.after(ending)
        if follows is not None:
            self._num_open += 1
            self.agenda.at(max(follows.arrival_s, ending.at_s), lambda: self._ask_counted(follows))
        self._num_open -= 1
        self._look_whether_over()

    def _look_whether_over(self) -> None:
        if self._all_came and not self._num_open and not self._hand.num_left:
            self._over.set()

    def triggered(self, fault: OnMessage, message: Message) -> None:
        self._hand.triggered(fault, message)

    def _fault_came(self, fault: Fault, text: str) -> None:
        index = engines_named(fault)
        target = "clients" if index is None else self.machines[index].name
        self.faults.append(FaultRecord(at_s=now_s(), target=target, text=text))

    # The world itself

    def store_oracle(self, block_size: int) -> StoreOracle | None:
        """One for all engines, as they share what is stored. None without a store, or if blocks differ."""
        if self.spec.store is None or len({engine.block_size for engine in self.spec.engines}) > 1:
            return None
        return self._store_oracles.setdefault(block_size, StoreOracle(STORE_IDENTITY, block_size))

    async def _sample(self) -> None:
        while True:
            for machine in self.machines:
                machine.sample()
            await trio.sleep(self.spec.sample_every_s)

    async def _settle(self) -> None:
        """Wait until nothing is under way, then hold the books against each other."""
        with trio.move_on_after(_SETTLE_WITHIN_S):
            pause_s = 0.1
            while not all(m.watch.is_settled() and not m.front.open for m in self.machines):
                await trio.sleep(pause_s)
                pause_s *= 1.2
        for machine in self.machines:
            if machine.front.open:
                raise BrokenPromise(f"requests whose clients left never ended: {list(machine.front.open)}")
            if machine.engine.status().worker == "ready":  # the pools of a lost one mean nothing
                machine.watch.check_settled()
        for oracle in self._store_oracles.values():
            oracle.check(self.stored)

    def _report(self, title: str, over_s: float, wall_s: float) -> RunRecord:
        for machine in self.machines:
            machine.count()
        settings: dict[str, Any] = msgspec.to_builtins(self.spec)
        return RunRecord(
            title=title,
            seed=self.seed,
            settings=settings,
            requests=self.requests,
            engines=[machine.record for machine in self.machines],
            faults=self.faults,
            counters=dict(sorted(self.log.counts.items())) if self.log is not None else {},
            virtual_s=over_s,
            wall_s=wall_s,
            digest=self.log.hexdigest() if self.log is not None else "",
        )
