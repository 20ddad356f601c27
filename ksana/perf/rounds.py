"""Timing rounds from outside: a scheduler that notes when its activations begin and end, and what it hears.

Cores may not read clocks, so the clock stands around the scheduler's `handle`. All of a round is seen there:
the order for it, the step plan (block allocator and SWA cache manager have answered by then), the results
with the worker's own times.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from ksana.messages.base import Message
from ksana.messages.blocks import PlanBlocks
from ksana.messages.steps import OperatorTime, StepDone, StepPlan
from ksana.perf.result import RoundSample
from ksana.scheduling.activation import Said
from ksana.scheduling.policy import Policy
from ksana.scheduling.scheduler import Scheduler
from ksana.scheduling.settings import SchedulerSettings

Clock = Callable[[], int]
"""Nanoseconds from somewhere."""


class MeasuredRound(msgspec.Struct, frozen=True, kw_only=True):
    """One round; forward_ns is divided by nothing yet."""

    sample: RoundSample
    operators: tuple[OperatorTime, ...]
    num_layer_rounds: int
    trace_operators: bool


class _Open(msgspec.Struct):
    """A round whose results are not there yet."""

    began_ns: int
    sent_ns: int = 0
    plan: StepPlan | None = None


class RoundTimer:
    """Makes rounds out of the scheduler's activations. Steps of the walk are not rounds."""

    def __init__(self) -> None:
        self._asked_ns: int | None = None
        self._open: deque[_Open] = deque()
        self._last_end_ns = 0
        self.rounds: deque[MeasuredRound] = deque()
        """The oldest first; whoever reads them takes them out."""

    def forget(self) -> None:
        """A batch ended, in whatever state."""
        self._asked_ns = None
        self._open.clear()
        self.rounds.clear()

    def activation(
        self, began_ns: int, ended_ns: int, messages: Sequence[Message], said: Sequence[Said]
    ) -> None:
        for message in messages:
            if isinstance(message, StepDone):
                self._take_results(message, began_ns, ended_ns)
        for _, message in said:
            if isinstance(message, PlanBlocks):
                self._asked_ns = began_ns
            elif isinstance(message, StepPlan) and _is_round(message) and self._asked_ns is not None:
                self._open.append(_Open(began_ns=self._asked_ns, sent_ns=ended_ns, plan=message))

    def _take_results(self, done: StepDone, received_ns: int, ended_ns: int) -> None:
        if not self._open or self._open[0].plan is None or self._open[0].plan.step_id != done.step_id:
            return
        one = self._open.popleft()
        plan = one.plan
        assert plan is not None
        assert plan.rehearsal is not None
        times = done.times
        worker_ns = times.prepare_ns + times.forward_ns + times.sample_ns
        # Planned ahead, it begins when the round before has ended, and waits in the worker until then.
        waited_until_ns = max(one.sent_ns, self._last_end_ns)
        sample = RoundSample(
            schedule_ns=one.sent_ns - one.began_ns,
            dispatch_ns=max(0, received_ns - waited_until_ns - worker_ns),
            prepare_ns=times.prepare_ns,
            forward_ns=times.forward_ns,
            sampling_ns=times.sample_ns,
            update_ns=ended_ns - received_ns,
            step_ns=ended_ns - max(one.began_ns, self._last_end_ns),
        )
        self._last_end_ns = ended_ns
        self.rounds.append(
            MeasuredRound(
                sample=sample,
                operators=done.operators,
                num_layer_rounds=plan.rehearsal.num_layer_rounds,
                trace_operators=plan.rehearsal.trace_operators,
            )
        )


def _is_round(plan: StepPlan) -> bool:
    return plan.rehearsal is not None and plan.rehearsal.fill_seed is None


class TimedScheduler(Scheduler):
    """A scheduler that tells a timer of its activations."""

    def __init__(
        self,
        settings: SchedulerSettings,
        policy: Policy,
        timer: RoundTimer,
        clock: Clock = time.perf_counter_ns,
    ) -> None:
        super().__init__(settings, policy)
        self._timer = timer
        self._clock = clock

    def handle(self, now_s: float, messages: Sequence[Message]) -> list[Said]:
        """One activation, or one for each round that is done, if several are at once (planned ahead)."""
        said: list[Said] = []
        last = 0
        for end, message in enumerate(messages, 1):
            if isinstance(message, StepDone) and end < len(messages):
                said += self._timed(now_s, messages[last:end])
                last = end
        return said + self._timed(now_s, messages[last:])

    def _timed(self, now_s: float, messages: Sequence[Message]) -> list[Said]:
        began_ns = self._clock()
        said = super().handle(now_s, messages)
        self._timer.activation(began_ns, self._clock(), messages, said)
        return said
