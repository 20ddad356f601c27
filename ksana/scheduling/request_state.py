"""What the scheduler knows about one request."""

from __future__ import annotations

from typing import Literal

import msgspec

from ksana.messages.base import RequestId
from ksana.messages.outputs import RequestTiming, Usage
from ksana.messages.requests import SamplingParams
from ksana.scheduling.stop_rules import StopRules

Phase = Literal["waiting", "loading", "running", "preempting", "ended"]
"""waiting: holds no blocks, unless a load left it some. loading: its prefix is being loaded. running: holds
blocks, has a row in most steps. preempting: gives its blocks back and waits again as soon as no step names
it. ended: answered; kept until no step, plan or load names it."""


class RequestState(msgspec.Struct, kw_only=True):
    """One request.

    Words: a token is *known* when the scheduler has its id, *scheduled* when a step that computes its KV was
    sent, *computed* when that step is done. A running request in decode has one token more than is scheduled.

    Invariants: num_computed <= num_scheduled <= num_tokens + num_samples_in_flight - (0 while waiting, 1
    otherwise a token is left to compute); num_computed <= num_tokens; output ids only ever grow.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    suppressed_token_ids: tuple[int, ...]
    stop_rules: StopRules
    cache_salt: str
    deadline_s: float
    arrival_time_s: float

    output_token_ids: list[int] = []
    phase: Phase = "waiting"
    in_plan: bool = False
    """Named by the PlanBlocks that is not answered yet."""
    holds_blocks: bool = False
    on_worker: bool = False
    """The worker knows it: no NewRow needed, and a drop when it goes."""

    num_scheduled: int = 0
    num_computed: int = 0
    num_in_flight: int = 0
    """Steps in the executor that name it."""
    num_samples_in_flight: int = 0

    num_reported_computed: int = 0
    """What the block allocator was told last; see `lifecycle.report_computed`."""
    num_reported_tokens: int = 0
    kv_is_suspect: bool = False
    """A row of it came back in error: what it computed since the last report must not become cache."""

    is_loading: bool = False
    """Its LoadPrefix is not answered yet."""
    is_load_cancelled: bool = False
    load_not_before: int = 0
    """How many steps must be done before its prefix may be loaded (again); see `remote_loads`."""

    num_cached_tokens: int | None = None
    """Prefix hit of the first run; None before it."""
    num_preemptions: int = 0

    num_crashes: int = 0
    """Worker crashes in a row in which it had a step in flight, without being cleared in between."""
    clear_at: int = 0
    """A suspect is cleared once this many of its tokens are computed again; 0 when it is none."""

    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that need KV before it ends by its limit at the latest: the last one is only sampled."""
        return len(self.prompt_token_ids) + self.stop_rules.max_tokens - 1

    def token_ids(self) -> tuple[int, ...]:
        """Prompt and output; O(1) before the first output token."""
        if not self.output_token_ids:
            return self.prompt_token_ids
        return self.prompt_token_ids + tuple(self.output_token_ids)

    def token_ids_from(self, start: int) -> tuple[int, ...]:
        """Known tokens from `start` on."""
        prompt_len = len(self.prompt_token_ids)
        if start >= prompt_len:
            return tuple(self.output_token_ids[start - prompt_len :])
        return self.prompt_token_ids[start:] + tuple(self.output_token_ids)

    def num_left(self) -> int:
        """Tokens that a step planned now could compute: known ones and those sampled in flight.
        0 when the steps in flight bring it to its limit for certain."""
        in_flight = self.num_samples_in_flight
        if len(self.output_token_ids) + in_flight >= self.stop_rules.max_tokens:
            return 0
        return len(self.prompt_token_ids) + len(self.output_token_ids) + in_flight - self.num_scheduled

    def is_ending(self) -> bool:
        """The steps in flight bring it to its limit for certain: its blocks are on their way back."""
        return len(self.output_token_ids) + self.num_samples_in_flight >= self.stop_rules.max_tokens

    def usage(self, num_output_tokens: int) -> Usage:
        return Usage(
            num_prompt_tokens=len(self.prompt_token_ids),
            num_output_tokens=num_output_tokens,
            num_cached_tokens=self.num_cached_tokens or 0,
        )

    def timing(self) -> RequestTiming:
        return RequestTiming(
            arrival_s=self.arrival_time_s,
            first_scheduled_s=self.first_scheduled_s,
            first_token_s=self.first_token_s,
            last_token_s=self.last_token_s,
        )
