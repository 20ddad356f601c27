"""What goes wrong in a world, and when: a plan that can be written down, and the hand that carries it out."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, dataclass_transform

import msgspec

from ksana.messages.base import Message
from ksana.messages.requests import Drain
from ksana.messages.steps import StepPlan
from ksana.runtime.clock import now_s
from ksana.stores.simulated import SimulatedStore
from simulations.agenda import Agenda
from simulations.engine import SimulatedEngine
from simulations.network import SlowMailbox, SlowMailboxes, SlowPost
from simulations.requests import NamedText, PromptSource, SimRequest

StoreFaultKind = Literal["down", "frozen", "slow", "losing", "corrupt"]
SlowActor = Literal[
    "tokenizer", "scheduler", "block_allocator", "swa_cache_manager", "executor", "remote_cache_loader"
]


@dataclass_transform(frozen_default=True, kw_only_default=True)
class _Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    at_s: float = 0.0


class WorkerCrash(_Fault, frozen=True, kw_only=True, tag="worker_crash"):
    """The worker of an engine dies in the middle of whatever it does."""

    engine: int = 0


class SlowWorker(_Fault, frozen=True, kw_only=True, tag="slow_worker"):
    engine: int = 0
    for_s: float = 1.0
    factor: float = 4.0


class StartFailures(_Fault, frozen=True, kw_only=True, tag="start_failures"):
    """The next starts of a worker fail (not the very first one of the run)."""

    engine: int = 0
    count: int = 1


class StoreTrouble(_Fault, frozen=True, kw_only=True, tag="store"):
    """What one engine has of the store. `share` is of the keys, for losing and corrupt."""

    engine: int = 0
    how: StoreFaultKind = "down"
    for_s: float = 1.0
    share: float = 0.5
    factor: float = 100.0
    """For slow."""


class SlowMessages(_Fault, frozen=True, kw_only=True, tag="slow_messages"):
    """All that is said to an actor comes so much later."""

    engine: int = 0
    actor: SlowActor = "scheduler"
    for_s: float = 1.0
    delay_s: float = 0.01


class Disconnects(_Fault, frozen=True, kw_only=True, tag="disconnects"):
    """So many of those who wait for an engine leave, all at once."""

    engine: int = 0
    share: float = 1.0


class Overload(_Fault, frozen=True, kw_only=True, tag="overload"):
    """Others come, all at once; what they ask depends on `seed`."""

    count: int = 20
    num_prompt_tokens: int = 32
    max_tokens: int = 16
    seed: int = 0


class BadRow(_Fault, frozen=True, kw_only=True, tag="bad_row"):
    """The row that should give output token `position` of a request gives an error instead."""

    request: int
    position: int = 0


class Poison(_Fault, frozen=True, kw_only=True, tag="poison"):
    """The worker dies of a request, whenever it computes a token at or behind `position` of it."""

    request: int
    position: int = 0


class OnMessage(_Fault, frozen=True, kw_only=True, tag="on_message"):
    """Something happens when an actor of an engine has heard its `nth` message of a kind: the worker dies, or
    the client of the request that the message names leaves (all, if it names none). `BlocksRefused` is a
    BlocksPlanned without a grant."""

    engine: int = 0
    message: str
    nth: int = 1
    do: Literal["crash", "leave"] = "crash"


class Drained(_Fault, frozen=True, kw_only=True, tag="drain"):
    """An engine is shut down: what it has fails with a 503, and so does all that comes."""

    engine: int = 0


Fault = (
    WorkerCrash
    | SlowWorker
    | StartFailures
    | StoreTrouble
    | SlowMessages
    | Disconnects
    | Overload
    | BadRow
    | Poison
    | OnMessage
    | Drained
)


class WorkerFaults:
    """What goes wrong with the worker of one engine."""

    def __init__(self) -> None:
        self.num_failing_starts = 0
        self.poisonous: dict[int, int] = {}
        """By request id of the engine: from which position on the worker dies of it."""
        self.num_poisoned = 0

    def start(self, epoch: int) -> str | None:
        if epoch == 1 or not self.num_failing_starts:
            return None
        self.num_failing_starts -= 1
        return "this start was planned to fail"

    def step(self, _number: int, plan: StepPlan) -> str | None:
        for row in plan.rows:
            position = self.poisonous.get(row.request_id)
            if position is not None and row.start + row.num_tokens > position:
                self.num_poisoned += 1
                return f"request {row.request_id} is poisonous"
        return None


class Explained(Protocol):
    """What explains how requests end, as far as faults do."""

    num_crashes: int
    is_drained: bool


class Faulty(Protocol):
    """One engine as faults see it."""

    @property
    def engine(self) -> SimulatedEngine: ...
    @property
    def facts(self) -> Explained: ...
    @property
    def worker_faults(self) -> WorkerFaults: ...
    @property
    def store(self) -> SimulatedStore | None: ...
    @property
    def triggers(self) -> dict[tuple[str, int], OnMessage]: ...
    @property
    def outputs(self) -> SlowPost:
        """What the scheduler says to the tokenizer."""
        ...

    def disconnect(self, share: float, rng: random.Random) -> None: ...
    def leave(self, request_id: int | None) -> None:
        """The client of this request leaves, or, if it is None, all do."""
        ...


class FaultHand:
    """Enters a plan into the agenda. `told` hears of each fault when it comes."""

    def __init__(
        self,
        agenda: Agenda,
        engines: Sequence[Faulty],
        *,
        ask: Callable[[SimRequest], None],
        told: Callable[[Fault, str], None],
        all_came: Callable[[], None],
        seed: int,
    ) -> None:
        """`ask` is given requests nobody planned for. `all_came` is called when no fault is left."""
        self._agenda = agenda
        self._engines = engines
        self._ask = ask
        self._told = told
        self._all_came = all_came
        self.num_left = 0
        """Faults that are still to come."""
        self._seed = seed

    def plan(self, faults: tuple[Fault, ...]) -> None:
        for number, fault in enumerate(faults):
            if isinstance(fault, OnMessage):
                self._engines[fault.engine].triggers[fault.message, fault.nth] = fault
            elif not isinstance(fault, BadRow | Poison):
                self.num_left += 1
                self._enter(fault, random.Random(self._seed * 1009 + number))

    def _enter(self, fault: Fault, rng: random.Random) -> None:
        def come() -> None:
            self._told(fault, _text(fault))
            self._do(fault, rng)
            self.num_left -= 1
            if not self.num_left:
                self._all_came()

        self._agenda.at(fault.at_s, come)

    def _do(self, fault: Fault, rng: random.Random) -> None:
        if isinstance(fault, Overload):
            for request in overload(fault):
                self._ask(request)
            return
        if isinstance(fault, BadRow | Poison | OnMessage):
            return
        faulty = self._engines[fault.engine]
        if isinstance(fault, WorkerCrash):
            faulty.facts.num_crashes += 1
            faulty.engine.crash_worker("killed by the plan")
        elif isinstance(fault, SlowWorker):
            faulty.engine.slow_worker(fault.factor)
            self._later(fault.at_s + fault.for_s, lambda: faulty.engine.slow_worker(1.0))
        elif isinstance(fault, StartFailures):
            faulty.facts.num_crashes += 1
            faulty.worker_faults.num_failing_starts += fault.count
        elif isinstance(fault, StoreTrouble):
            self._trouble(faulty.store, fault)
        elif isinstance(fault, SlowMessages):
            self._slow_down(faulty, fault)
        elif isinstance(fault, Disconnects):
            faulty.disconnect(fault.share, rng)
        else:
            faulty.facts.is_drained = True
            faulty.engine.mailboxes.scheduler.put(Drain())

    def triggered(self, fault: OnMessage, message: Message) -> None:
        """The message that a fault waited for was heard; it comes as soon as nobody is at work."""
        faulty = self._engines[fault.engine]
        request_id = getattr(message, "request_id", None)

        def come() -> None:
            self._told(fault, _text(fault))
            if fault.do == "crash":
                faulty.facts.num_crashes += 1
                faulty.engine.crash_worker("killed by the plan")
            else:
                faulty.leave(request_id)

        self._agenda.at(now_s(), come)

    def _slow_down(self, faulty: Faulty, fault: SlowMessages) -> None:
        slow: SlowPost | SlowMailbox = faulty.outputs
        if fault.actor != "tokenizer":
            mailboxes = faulty.engine.mailboxes
            assert isinstance(mailboxes, SlowMailboxes)
            slow = mailboxes.slow[fault.actor]
        slow.delay_s = fault.delay_s
        self._later(fault.at_s + fault.for_s, lambda: setattr(slow, "delay_s", 0.0))

    def _trouble(self, store: SimulatedStore | None, fault: StoreTrouble) -> None:
        if store is None:
            return
        if fault.how == "frozen":
            store.freeze()
            self._later(fault.at_s + fault.for_s, store.thaw)
            return
        names: dict[str, tuple[float, float]]
        if fault.how == "down":
            names = {"down": (True, False)}
        elif fault.how == "slow":
            names = {"slowdown": (fault.factor, 1.0)}
        elif fault.how == "losing":
            names = {"missing_share": (fault.share / 2, 0.0), "vanishing_share": (fault.share / 2, 0.0)}
        else:
            names = {"corrupt_share": (fault.share / 2, 0.0), "truncated_share": (fault.share / 2, 0.0)}
        for name, (bad, _) in names.items():
            setattr(store.faults, name, bad)

        def heal() -> None:
            for name, (_, good) in names.items():
                setattr(store.faults, name, good)

        self._later(fault.at_s + fault.for_s, heal)

    def _later(self, at_s: float, do: Callable[[], None]) -> None:
        self._agenda.at(at_s, do)


def overload(fault: Overload) -> list[SimRequest]:
    """Requests nobody planned for. Their texts are their own."""
    rng = random.Random(fault.seed)
    return [
        SimRequest(
            arrival_s=fault.at_s,
            prompt=PromptSource(
                (NamedText(rng.randrange(1 << 30), rng.randint(1, fault.num_prompt_tokens)),)
            ),
            max_tokens=rng.randint(1, fault.max_tokens),
        )
        for _ in range(fault.count)
    ]


def engines_named(fault: Fault) -> int | None:
    """The index of the engine that a fault hits, if it hits one."""
    return None if isinstance(fault, Overload | BadRow | Poison) else fault.engine


def _text(fault: Fault) -> str:
    facts = {name: getattr(fault, name) for name in fault.__struct_fields__ if name not in ("at_s", "engine")}
    kind = type(fault).__struct_config__.tag
    return " ".join([str(kind), *(f"{name}={value}" for name, value in facts.items())])
