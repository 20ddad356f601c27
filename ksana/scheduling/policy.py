"""What may decide on the next step in place of the planner, for producers that measure the scheduler."""

from __future__ import annotations

from typing import Protocol

from ksana.messages.base import Message
from ksana.messages.blocks import PlanBlocks
from ksana.scheduling.activation import Activation
from ksana.scheduling.settings import SchedulerSettings
from ksana.scheduling.state import SchedulerState


class Policy(Protocol):
    """Everything else stays the scheduler's: admission, results, endings, the loss of the worker.

    What a policy remembers is not in the scheduler's snapshot.
    """

    def receive(
        self, state: SchedulerState, settings: SchedulerSettings, message: Message, act: Activation
    ) -> bool:
        """Shown each message first. True: it was for the policy, and nobody else is to look at it."""
        ...

    def plan(self, state: SchedulerState, settings: SchedulerSettings, act: Activation) -> PlanBlocks | None:
        """Once per activation, after all messages: the next question to the block allocator, if any. May
        change what `act` is about to say."""
        ...
