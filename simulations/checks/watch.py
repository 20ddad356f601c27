"""Watches one engine of a world: every step plan, the cache between batches, and that work goes on."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

import trio

from ksana.cache.invariants import check_together
from ksana.messages.base import Message, StepId
from ksana.messages.blocks import BlocksPlanned, PoolUse
from ksana.messages.steps import StepDone, StepPlan, WorkerLost, WorkerReady
from ksana.runtime.actor import Address, Said
from simulations.checks.admission_watch import AdmissionWatch, check_lapsed
from simulations.checks.checkers import EngineFacts, check_books
from simulations.checks.oracles import EvictionWatch, leftovers
from simulations.checks.promises import BrokenPromise
from simulations.checks.queue_watch import QueueWatch
from simulations.engine import SimulatedEngine
from simulations.faults import OnMessage
from simulations.network import SlowMailboxes
from simulations.reports.metrics import StepLog

ALL_REFUSED = "BlocksRefused"
"""What faults call a BlocksPlanned without a grant."""
_MOST_ACTIVATIONS = 1_000_000
"""Of the scheduler in a world that is checked: far more than the small worlds of a swarm take."""
_LOOK_EVERY_S = 0.7307
"""At no round time, so as to fall between events."""


class EngineWatch:
    """A tap on all actors of one engine. Raises BrokenPromise in the task of the actor that broke it."""

    def __init__(
        self,
        facts: EngineFacts,
        *,
        steps: StepLog | None = None,
        check_cache: bool = False,
        triggered: Callable[[OnMessage, Message], None] | None = None,
        then: Callable[[Address, float, Sequence[Message], Sequence[Said]], None] | None = None,
    ) -> None:
        """`steps`: where to write them down. `check_cache`: the books of both allocators, between batches.
        `triggered` is told when a message came that a fault waited for.
        `then`: another tap."""
        self.facts = facts
        self.engine: SimulatedEngine
        self._steps = steps
        self._check_cache = check_cache
        self._then = then
        self._triggered = triggered
        self.triggers: dict[tuple[str, int], OnMessage] = {}
        """Faults that wait for the nth message of a kind."""
        self._heard: Counter[str] = Counter()
        self._num_activations = 0
        self._queue = QueueWatch(facts.spec)
        self._evictions = EvictionWatch()
        self._admissions = AdmissionWatch(facts.spec)
        self._sent: deque[tuple[StepPlan, float]] = deque()
        """Steps in the executor, and when they were sent."""
        self._last_end_s = 0.0
        self._last_step_id: StepId = 0

    def tap(self, actor: Address, now_s: float, messages: Sequence[Message], said: Sequence[Said]) -> None:
        if self.triggers:
            self._hear(messages)
        if actor == "scheduler":
            self._check_gave_up(messages)
            if any(isinstance(message, WorkerLost | WorkerReady) for message in messages):
                self._sent.clear()  # plans that crossed with the news are for nobody
            for _, message in said:
                if isinstance(message, StepPlan):
                    self._take_plan(message, now_s)
            if self._check_cache:
                spec = self.facts.spec
                is_well = not (self.facts.num_losses or spec.hold_when_short)
                is_simple = is_well and not self.facts.has_store
                self._queue.take(
                    now_s, messages, said, self.engine.cores, is_simple=is_simple, is_well=is_well
                )
                self._count_activation()
        elif actor == "executor":
            for _, message in said:
                if isinstance(message, StepDone):
                    self._take_done(message, now_s)
                elif isinstance(message, WorkerLost):
                    self._count_loss()
                    self.facts.gave_up = self.facts.gave_up or not message.restarting
                    self._sent.clear()
        elif actor == "block_allocator" and self._check_cache:
            cores = self.engine.cores
            self._evictions.attach(cores.allocator, cores.manager)
            self._admissions.attach(cores.allocator, cores.manager)
            if not any(address == "swa_cache_manager" for address, _ in said):
                self.check_cache()
        if self._then is not None:
            self._then(actor, now_s, messages, said)

    def _hear(self, messages: Sequence[Message]) -> None:
        for message in messages:
            name = type(message).__name__
            if isinstance(message, BlocksPlanned) and message.refusals and not message.grants:
                name = ALL_REFUSED
            self._heard[name] += 1
            fault = self.triggers.get((name, self._heard[name]))
            if fault is not None and self._triggered is not None:
                self._triggered(fault, message)

    def _check_gave_up(self, messages: Sequence[Message]) -> None:
        """When there will be no worker for a long time, nobody is left waiting for one."""
        lost = [message for message in messages if isinstance(message, WorkerLost)]
        if lost and not lost[-1].restarting and self.engine.status().has_work:
            raise BrokenPromise("the executor gave up, and requests still wait")

    def _count_loss(self) -> None:
        self.facts.num_losses += 1
        if self.facts.num_losses == 1:
            in_flight = {row.request_id for plan, _ in self._sent for row in plan.rows}
            self.facts.num_first_suspects = len(in_flight)

    def _count_activation(self) -> None:
        self._num_activations += 1
        if self._num_activations > _MOST_ACTIVATIONS:
            raise BrokenPromise(f"the scheduler was activated {_MOST_ACTIVATIONS} times: it runs in circles")

    def _take_plan(self, plan: StepPlan, now_s: float) -> None:
        spec, num_tokens = self.facts.spec, sum([row.num_tokens for row in plan.rows])
        if num_tokens > spec.max_num_batched_tokens or not plan.rows:
            raise BrokenPromise(f"step {plan.step_id} computes {num_tokens} tokens in {len(plan.rows)} rows")
        if len(plan.rows) > spec.max_num_seqs:
            raise BrokenPromise(f"step {plan.step_id} has {len(plan.rows)} rows, {spec.max_num_seqs} allowed")
        if len({row.request_id for row in plan.rows}) < len(plan.rows):
            raise BrokenPromise(f"step {plan.step_id} has two rows of one request")
        if plan.step_id <= self._last_step_id:
            raise BrokenPromise(f"step {plan.step_id} after step {self._last_step_id}")
        self._last_step_id = plan.step_id
        self._sent.append((plan, now_s))
        if len(self._sent) > (2 if spec.plan_ahead else 1):
            raise BrokenPromise(f"{len(self._sent)} steps in the executor at once")

    def _take_done(self, done: StepDone, now_s: float) -> None:
        while self._sent and self._sent[0][0].step_id < done.step_id:
            self._sent.popleft()
        if not self._sent:
            return
        plan, sent_s = self._sent.popleft()
        if self._steps is not None:
            num_rows, num_tokens = len(plan.rows), sum([row.num_tokens for row in plan.rows])
            self._steps.append(max(sent_s, self._last_end_s), now_s, num_rows, num_tokens)
        self._last_end_s = now_s

    def check_cache(self) -> None:
        """The books of block allocator and SWA cache manager, if nothing is on its way between them."""
        cores, mailboxes = self.engine.cores, self.engine.mailboxes
        if mailboxes.allocators_are_quiet() and not cores.allocator.is_batch_open:
            check_together(cores.allocator, cores.manager)
            if cores.manager is not None:
                check_lapsed(cores.allocator, cores.manager)

    async def watch(self) -> None:
        """Look, now and then, whether there is work that nobody does. Runs until cancelled."""
        before: tuple[StepId, int] | None = None
        while True:
            await trio.sleep(_LOOK_EVERY_S)
            if self._is_quiet() and self.engine.num_open and not self.engine.status().has_work:
                raise BrokenPromise(
                    f"{self.engine.num_open} requests are open, and the scheduler has no work"
                )
            now = self._idle_with_work()
            if now is not None and now == before:
                status = self.engine.status()
                raise BrokenPromise(
                    f"nobody works: {status.num_running} running and {status.num_waiting} waiting requests, "
                    f"no step, plan, load or message under way; the last step is {status.last_step_id}"
                )
            before = now

    def _idle_with_work(self) -> tuple[StepId, int] | None:
        """Where the scheduler stands, if it has work and yet nothing is under way."""
        status = self.engine.status()
        if not status.has_work or status.worker != "ready" or status.num_loading:
            return None
        if status.num_steps_in_flight or self.engine.cores.allocator.is_batch_open or not self._is_quiet():
            return None
        if any(use.num_held for use in self.uses()):
            return None  # for write-back; the store's deadline frees them
        return status.last_step_id, status.num_waiting

    def _is_quiet(self) -> bool:
        mailboxes = self.engine.mailboxes
        if isinstance(mailboxes, SlowMailboxes) and mailboxes.num_on_the_way():
            return False
        return not (len(mailboxes.scheduler) or len(mailboxes.executor)) and mailboxes.allocators_are_quiet()

    def uses(self) -> list[PoolUse]:
        cores = self.engine.cores
        uses = [cores.allocator.fa.pool.use()]
        if cores.manager is not None:
            uses.append(cores.manager.cache.pool.use())
        return uses

    def is_settled(self) -> bool:
        """Every block is free or cache, and nothing is under way."""
        if self.engine.status().has_work or not self._is_quiet():
            return False
        return all(use.num_free + use.num_cached == use.num_blocks for use in self.uses())

    def check_settled(self) -> None:
        """At the end: raises BrokenPromise for what has leaked."""
        if not self.is_settled():
            uses = ", ".join(str(use) for use in self.uses())
            raise BrokenPromise(f"not all is given back when everything is over: {uses}")
        self.check_cache()
        cores = self.engine.cores
        if cores.allocator.fa.requests or cores.allocator.fa.loads or cores.allocator.fa.holds:
            raise BrokenPromise(f"the block allocator remembers {list(cores.allocator.fa.requests)}")
        if cores.allocator.fa.num_set_aside:
            raise BrokenPromise(f"{cores.allocator.fa.num_set_aside} blocks are set aside for nobody")
        left = leftovers(cores.scheduler.snapshot())
        if cores.manager is not None and cores.manager.tables.num_set_aside:
            raise BrokenPromise(f"{cores.manager.tables.num_set_aside} SWA blocks are set aside for nobody")
        if left:
            raise BrokenPromise(f"the scheduler has no work and still remembers {', '.join(left)}")
        if self.engine.remote is not None and self.engine.remote.status().num_loading:
            raise BrokenPromise("a load goes on when everything is over")
        if self.facts.oracle is not None:
            status = self.engine.status()
            check_books(self.facts, status.counters, status.cache)
