"""A circuit breaker: a store that does not answer costs a few requests one deadline each, then nothing.

    closed     calls go through; `failures_to_open` failures in a row, or one timeout, open it
    open       no call goes through; when the wait is over, a probe is due
    half_open  one probe is out and decides: closed, or open with the wait doubled

A probe runs in the background and never makes a request wait: ordinary calls are refused until one has
succeeded. Light calls (a lookup) and heavy ones (a transfer) are counted apart, and only a heavy one that
succeeds shortens the wait: a store may answer the former and never the latter.

Pure: time is passed in, and `state` is all there is, so it can go into a journal and come back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from ksana.messages.base import Value

BreakerPhase = Literal["closed", "open", "half_open"]
CallWeight = Literal["light", "heavy"]


@dataclass(frozen=True)
class BreakerSettings:
    failures_to_open: int = 3
    first_wait_s: float = 1.0
    """From the first opening to the first probe; doubled with every opening that follows."""
    max_wait_s: float = 60.0
    probe_timeout_s: float = 5.0
    """A probe that has said nothing for so long counts as failed, even if whoever ran it is gone."""

    def __post_init__(self) -> None:
        if self.failures_to_open < 1:
            raise ValueError(f"failures_to_open must be at least 1, not {self.failures_to_open}")
        if not 0 < self.first_wait_s <= self.max_wait_s:
            raise ValueError(
                f"0 < first_wait_s ({self.first_wait_s}) <= max_wait_s ({self.max_wait_s}) is wrong"
            )
        if self.probe_timeout_s <= 0:
            raise ValueError(f"probe_timeout_s must be above 0, not {self.probe_timeout_s}")


class BreakerState(Value):
    phase: BreakerPhase = "closed"
    num_failures: int = 0
    """Closed: failures of heavy calls in a row."""
    num_light_failures: int = 0
    """Closed: failures of light calls in a row."""
    due_s: float = 0.0
    """Open: when a probe is due. Half open: when the probe counts as failed."""
    wait_s: float = 0.0
    """The wait of the last opening; 0 if there was none since a heavy call succeeded."""
    num_openings: int = 0
    """Since the start; for metrics."""


class CircuitBreaker:
    """Ask `allows` before a call and tell how it went; ask `start_probe` when `next_timer_s` has come."""

    def __init__(self, settings: BreakerSettings | None = None, state: BreakerState | None = None) -> None:
        self.settings = settings or BreakerSettings()
        self.state = state or BreakerState()

    @property
    def allows(self) -> bool:
        """Whether a call may be made now."""
        return self.state.phase == "closed"

    # how calls went; told late, of calls that were under way when it opened, it changes nothing

    def succeeded(self, weight: CallWeight = "heavy") -> None:
        """A call was answered. Failures of its weight are forgotten; after a heavy one the wait, too."""
        if self.state.phase != "closed":
            return
        if weight == "heavy":
            self._set(num_failures=0, wait_s=0.0)
        else:
            self._set(num_light_failures=0)

    def failed(self, now_s: float, weight: CallWeight = "heavy") -> None:
        """A call was answered with an error, or could not be made."""
        state = self.state
        if state.phase != "closed":
            return
        if weight == "heavy":
            self._set(num_failures=state.num_failures + 1)
        else:
            self._set(num_light_failures=state.num_light_failures + 1)
        if max(self.state.num_failures, self.state.num_light_failures) >= self.settings.failures_to_open:
            self._open(now_s)

    def timed_out(self, now_s: float) -> None:
        """A call was not answered before its deadline: enough to open, as each of these is dear."""
        if self.state.phase == "closed":
            self._open(now_s)

    # probes

    def next_timer_s(self) -> float | None:
        """When `start_probe` is to be asked again; None while closed."""
        return None if self.state.phase == "closed" else self.state.due_s

    def start_probe(self, now_s: float) -> bool:
        """Whether to send a probe now; if so it counts as sent."""
        if self.state.phase == "half_open" and now_s >= self.state.due_s:
            self._open(now_s)
        if self.state.phase != "open" or now_s < self.state.due_s:
            return False
        self._set(phase="half_open", due_s=now_s + self.settings.probe_timeout_s)
        return True

    def probe_succeeded(self) -> None:
        """Calls go through again, on probation: the next failure opens with a longer wait."""
        if self.state.phase == "half_open":
            almost = self.settings.failures_to_open - 1
            self._set(phase="closed", num_failures=almost, num_light_failures=almost, due_s=0.0)

    def probe_failed(self, now_s: float) -> None:
        if self.state.phase == "half_open":
            self._open(now_s)

    def _open(self, now_s: float) -> None:
        settings = self.settings
        wait_s = min(self.state.wait_s * 2, settings.max_wait_s) or settings.first_wait_s
        self._set(
            phase="open",
            num_failures=0,
            num_light_failures=0,
            due_s=now_s + wait_s,
            wait_s=wait_s,
            num_openings=self.state.num_openings + 1,
        )

    def _set(self, **changes: object) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)
