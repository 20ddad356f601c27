"""What a device executor drives: a worker behind a process boundary, in this process, or simulated."""

from __future__ import annotations

from typing import Protocol

import msgspec

from ksana.devices.staging import StagingArea
from ksana.errors import KsanaError
from ksana.messages.base import PoolEpoch
from ksana.messages.staging import CopyFromStaging, CopyToStaging, StagingCopied
from ksana.messages.steps import StepDone, StepPlan

Order = StepPlan | CopyFromStaging | CopyToStaging
"""What a worker does, one after the other."""

Answer = StepDone | StagingCopied
"""What it says when an order is done: StepDone to a plan, StagingCopied to a copy."""


class WorkerLostError(KsanaError):
    """The worker is gone. What it knew (requests, KV) is lost; `start` makes a new one."""


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker must know to load the model and make its pools. Sizes in blocks and tokens."""

    model_path: str
    num_fa_blocks: int
    num_swa_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    num_threads: int | None = None
    staging: StagingArea | None = None
    """Memory shared with the engine, if there is a remote cache."""


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a worker says of itself when it is ready."""

    device: str
    """For people: device, kernels, threads."""
    dtype: str = "float32"
    kv_cache_bytes: int = 0
    load_time_s: float = 0.0


class Backend(Protocol):
    """One worker at a time. `submit` and `receive` are called by two tasks; `start` and `stop` by none else.

    Orders are done as they were submitted, one after the other; more than one may be in flight.
    """

    async def start(self, epoch: PoolEpoch) -> WorkerInfo:
        """Bring up a worker with empty pools. A worker still there is stopped before.

        Raises ModelLoadError when the model cannot be loaded at all, WorkerLostError for anything else.
        """
        ...

    async def submit(self, order: Order) -> None:
        """Hand over a plan or a copy. A worker that is gone is not reported here but by `receive`."""
        ...

    async def receive(self) -> Answer:
        """Wait for the next order to be done. Raises WorkerLostError as soon as the worker is gone."""
        ...

    async def stop(self) -> None:
        """End the worker, in bounded time, whatever it does; no process is left. May be called twice."""
        ...


class Runner(Protocol):
    """What runs steps. An exception out of it ends the worker."""

    def run(self, plan: StepPlan) -> StepDone: ...

    def copy_staged(self, order: CopyFromStaging | CopyToStaging) -> StagingCopied:
        """Copy between staging memory and pools."""
        ...
