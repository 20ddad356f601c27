"""How an engine is doing: one snapshot for /health, /metrics, log lines and whoever else asks."""

from __future__ import annotations

from typing import Literal

from ksana.messages.base import PoolEpoch, StepId, Value
from ksana.messages.blocks import CacheCounters, PoolUse
from ksana.messages.stores import RemoteCacheStatus

WorkerState = Literal["ready", "restarting", "given_up", "stopped"]
"""`given_up`: too many restarts without a good step between them; still tried again, but slowly."""


class ModelInfo(Value):
    """What is served, as far as a client may want to know it."""

    name: str
    """The name clients use."""
    path: str
    fingerprint: str
    family: str
    dtype: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_fa_blocks: int
    num_swa_blocks: int
    kv_cache_bytes: int
    sliding_window: int | None = None
    device: str = ""
    """What the worker says of its device and kernels."""
    eos_token_ids: tuple[int, ...] = ()


class SchedulerCounters(Value):
    """Totals since the engine started."""

    num_prompt_tokens: int = 0
    """Prompt tokens of requests that got to run, each request once, however often it is recomputed."""
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    """Tokens that went through the model, with those computed again after a preemption or a crash."""
    num_steps: int = 0
    num_preemptions: int = 0
    num_stopped: int = 0
    """Finished by an end token or a stop string."""
    num_length: int = 0
    """Finished by max_tokens or the context."""
    num_failed: int = 0
    num_aborted: int = 0

    @property
    def num_finished(self) -> int:
        return self.num_stopped + self.num_length


class JournalStatus(Value):
    """How recording is doing, since the engine started."""

    num_activations: int = 0
    num_bytes: int = 0
    segment: int = 0
    """The number of the segment that is being written."""
    stopped: str | None = None
    """Why nothing is recorded any more."""


class EngineStatus(Value):
    """A snapshot. Times are of the engine's clock, in seconds."""

    now_s: float
    last_progress_s: float
    """When a step was last done, or work last began after there was none."""
    num_open_slots: int
    """Requests that are anywhere in the engine, or whose output nobody has taken yet."""
    num_running: int
    num_waiting: int
    fa_use: PoolUse | None
    swa_use: PoolUse | None
    cache: CacheCounters
    counters: SchedulerCounters
    worker_state: WorkerState
    worker_epoch: PoolEpoch
    last_step_id: StepId = 0
    num_worker_restarts: int = 0
    num_core_crashes: int = 0
    """How often an actor broke and all requests were failed with a 500."""
    num_refused: int = 0
    """Requests that were told 429 because every slot was taken."""
    broken: bool = False
    """Actors broke too often: nothing is served until the process is restarted."""
    draining: bool = False
    num_loading: int = 0
    """Waiting requests whose prefixes are being loaded from the remote cache."""
    remote: RemoteCacheStatus | None = None
    """None without a remote cache."""
    journal: JournalStatus | None = None
    """None without a journal."""

    @property
    def has_work(self) -> bool:
        return self.num_running + self.num_waiting > 0

    def unhealthy_because(self, stall_timeout_s: float) -> str | None:
        """Why `/health` must fail, or None. Health is progress on the work there is."""
        if self.broken:
            return "the engine stopped after repeated internal errors; restart the server"
        if self.worker_state == "given_up":
            return "the worker process keeps dying; see the log"
        if self.worker_state == "stopped":
            return "the engine is stopped"
        if self.worker_state == "restarting":
            return None  # bounded by the time a worker may take to start, and by the number of restarts
        idle_s = self.now_s - self.last_progress_s
        if self.has_work and idle_s > stall_timeout_s:
            return f"no step was done for {idle_s:.0f} s although there is work"
        return None
