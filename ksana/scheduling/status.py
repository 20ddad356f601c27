"""What the scheduler tells about itself: for /health, /metrics and the log line."""

from __future__ import annotations

from typing import Literal

import msgspec

from ksana.messages.base import PoolEpoch, StepId
from ksana.messages.blocks import CacheCounters, PoolUse
from ksana.messages.remote import LoadOutcome

WorkerState = Literal["starting", "ready", "restarting", "lost"]
"""lost: the executor has given up; requests are refused until a worker is ready again."""


class SchedulerCounters(msgspec.Struct, kw_only=True):
    """Totals since start."""

    num_added: int = 0
    num_stopped: int = 0
    num_length: int = 0
    num_failed: int = 0
    num_aborted: int = 0
    num_preemptions: int = 0
    num_worker_losses: int = 0
    num_steps: int = 0
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0
    """Of requests that began to run; counted once per request."""
    num_cached_tokens: int = 0
    """Of those, how many came from the prefix cache at the first run."""
    num_computed_tokens: int = 0
    """Everything computed by steps done, decodes and recomputing included."""
    num_ignored_rows: int = 0
    """Results of requests that had ended before (planned ahead, or aborted with a step in flight)."""
    num_late_messages: int = 0
    """Answers of a former worker, aborts and stops of requests already gone."""


class SchedulerStatus(msgspec.Struct, frozen=True, kw_only=True):
    num_running: int
    num_waiting: int
    """With those whose prefixes are being loaded."""
    num_loading: int
    num_steps_in_flight: int
    has_work: bool
    """Some request is not ended yet."""
    last_progress_s: float
    """Engine clock time of the last step done, request ended, worker ready, or first request after a quiet
    time. The engine is stalled when it has work and this lies too far back."""
    worker: WorkerState
    pool_epoch: PoolEpoch
    last_step_id: StepId
    draining: bool
    num_suspects: int
    """Requests being tried alone or in groups after a crash of the worker."""
    counters: SchedulerCounters
    """A copy."""
    num_loads: int
    """Since start."""
    load_outcomes: dict[LoadOutcome, int]
    """Of loads that were answered in the epoch they began in."""
    prefill_tokens_per_s: float
    fa_use: PoolUse | None
    swa_use: PoolUse | None
    cache: CacheCounters | None
