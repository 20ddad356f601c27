"""One engine of a world, and what belongs to it: its front end, its link, its store, what watches it."""

from __future__ import annotations

import random
from typing import Protocol

import msgspec

from ksana.costs.step_cost import StepCost
from ksana.messages.base import Message
from ksana.messages.blocks import PoolUse
from ksana.runtime.clock import now_s
from ksana.stores.simulated import SimulatedStore
from simulations.agenda import Agenda
from simulations.checks.checkers import EngineFacts
from simulations.checks.oracles import PrefixOracle, StoreOracle
from simulations.checks.watch import EngineWatch
from simulations.engine import EngineSpec, SimulatedEngine
from simulations.faults import OnMessage, Poison, SlowMessages, WorkerFaults, engines_named
from simulations.frontend import FrontEnd
from simulations.keep import Keep
from simulations.network import Link, SlowMailboxes, SlowPost
from simulations.reports.metrics import EngineRecord, EngineSample, StepLog
from simulations.requests import Ending
from simulations.scenario import WorldSpec
from simulations.script import Scripts
from simulations.world_log import WorldLog


class Surroundings(Protocol):
    """What an engine has in common with the others."""

    spec: WorldSpec
    seed: int
    cost: StepCost
    keep: Keep
    agenda: Agenda
    log: WorldLog | None
    stored: dict[bytes, bytes]
    host_s: float

    def take_ending(self, ending: Ending) -> None: ...
    def triggered(self, fault: OnMessage, message: Message) -> None: ...
    def store_oracle(self, block_size: int) -> StoreOracle | None: ...


class Machine:
    """One engine and what belongs to it."""

    def __init__(self, world: Surroundings, index: int, spec: EngineSpec) -> None:
        self.name = f"engine-{index}"
        self.spec = spec
        self.worker_faults = WorkerFaults()
        self.facts = EngineFacts(spec, self.worker_faults)
        self.facts.slowest_message_s = max(
            (f.delay_s for f in world.spec.faults if isinstance(f, SlowMessages) and f.engine == index),
            default=0.0,
        )
        keep, checked = world.keep, world.spec.fidelity == "checked"
        self.facts.has_store = world.spec.store is not None
        self.facts.is_calm = not world.spec.faults
        self.facts.num_poisons = sum(isinstance(fault, Poison) for fault in world.spec.faults)
        if checked and keep.check_cache:
            self.facts.oracle = PrefixOracle(spec)
            self.facts.store_oracle = world.store_oracle(spec.block_size)
            self.facts.stored = world.stored
        self.scripts = Scripts()
        self.front = FrontEnd(
            self.name,
            spec.num_slots,
            scripts=self.scripts,
            link=Link(world.spec.to_engines, world.agenda),
            facts=self.facts,
            ended=world.take_ending,
            check_answers=keep.check_answers,
            keep_token_times=keep.token_times,
            keep_prompts=checked,
        )
        self.store: SimulatedStore | None = None
        if world.spec.store is not None:
            self.store = SimulatedStore(
                world.seed * 31 + index,
                latency_s=world.spec.store.latency_s,
                jitter=world.spec.store.jitter,
                bytes_per_s=world.spec.store.bytes_per_s,
                values=world.stored,
            )
        self.record = EngineRecord(name=self.name, steps=StepLog() if keep.steps else None)
        self.watch = EngineWatch(
            self.facts,
            triggered=world.triggered,
            steps=self.record.steps,
            check_cache=keep.check_cache,
            then=world.log.tap(self.name) if world.log is not None else None,
        )
        self.outputs = SlowPost(self.front.take_outputs, world.agenda)
        is_slowable = any(engines_named(fault) == index for fault in world.spec.faults)
        self.engine = SimulatedEngine(
            spec,
            cost=world.cost,
            host_s=world.host_s,
            tokens=self.scripts,
            fast=not checked,
            listener=self.outputs,
            store=self.store,
            tap=self.watch.tap,
            check_messages=keep.check_cache,
            fault=self.worker_faults.step,
            start_fault=self.worker_faults.start,
            mailboxes=SlowMailboxes(spec.num_slots, spec.max_remote_loads, world.agenda)
            if is_slowable
            else None,
        )
        self.front.engine = self.engine
        self.watch.engine = self.engine

    def disconnect(self, share: float, rng: random.Random) -> None:
        self.front.disconnect(share, rng)

    def leave(self, request_id: int | None) -> None:
        self.front.leave(request_id)

    @property
    def triggers(self) -> dict[tuple[str, int], OnMessage]:
        return self.watch.triggers

    def sample(self) -> None:
        status = self.engine.status()
        fa, *swa = self.watch.uses()
        cache = status.cache
        self.record.samples.append(
            EngineSample(
                at_s=now_s(),
                num_running=status.num_running,
                num_waiting=status.num_waiting - status.num_loading,
                num_loading=status.num_loading,
                fa_use=_share(fa),
                swa_use=_share(swa[0]) if swa else 0.0,
                num_queried_tokens=cache.num_queried_tokens if cache else 0,
                num_hit_tokens=cache.num_hit_tokens if cache else 0,
            )
        )

    def count(self) -> None:
        """Fill the record's counters, at the end of the run."""
        status = self.engine.status()
        self.record.counters.update(msgspec.to_builtins(status.counters))
        totals = self.engine.cores.allocator.totals
        self.record.counters.update(msgspec.to_builtins(totals))
        self.record.counters["num_worker_restarts"] = self.engine.executor.num_restarts
        self.record.counters["num_refused"] = self.front.num_refused
        self.record.counters["num_loads"] = status.num_loads


def _share(use: PoolUse) -> float:
    return 1 - (use.num_free + use.num_cached) / use.num_blocks
