"""An engine whose worker runs in this process, on a model loaded once, and keeps a digest of all logits."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import torch
import trio.testing

from ksana import kernels
from ksana.config import Settings
from ksana.devices.backend import Answer, WorkerInfo
from ksana.devices.inline import InlineBackend
from ksana.devices.runner import ModelRunner
from ksana.engine import Engine
from ksana.messages.base import RequestId
from ksana.messages.steps import Row, StepPlan
from ksana.model_setup import ModelFiles, ModelSetup
from ksana.models.batch import KvCache, StepBatch
from ksana.models.decoder import Model


class Recording:
    """What the workers of one engine computed."""

    def __init__(self) -> None:
        self._digests: dict[tuple[RequestId, int], bytes] = {}
        self.differing: list[tuple[RequestId, int]] = []
        """Logits that were computed again, after a preemption, and were not the same bits."""
        self.num_planned_ahead = 0
        """Steps that stood ready when the one before them began to run."""
        self.max_rows = 0
        self.pause_per_token_s = 0.0
        """What computing takes longer, so that it pays to load the KV even of a tiny model."""

    def add(self, request_id: RequestId, position: int, logits: torch.Tensor) -> None:
        """Logits [vocab] that give the output token at `position`."""
        digest = hashlib.blake2b(logits.numpy().tobytes(), digest_size=8).digest()
        if self._digests.setdefault((request_id, position), digest) != digest:
            self.differing.append((request_id, position))

    def of(self, request_id: RequestId, num_tokens: int) -> tuple[bytes, ...]:
        """Digests of the logits of a request's first output tokens."""
        return tuple(self._digests[request_id, position] for position in range(num_tokens))


class RecordedModel:
    """A model that tells a recording what it gave to whom; the runner says before each batch for whom."""

    def __init__(self, model: Model, recording: Recording) -> None:
        self.spec = model.spec
        self.sampling: list[tuple[RequestId, int]] = []
        self._model = model
        self._recording = recording

    def forward(self, batch: StepBatch, kv: KvCache) -> torch.Tensor:
        if self._recording.pause_per_token_s:
            time.sleep(self._recording.pause_per_token_s * len(batch.token_ids))
        logits = self._model.forward(batch, kv)
        for (request_id, position), row in zip(self.sampling, logits, strict=True):
            self._recording.add(request_id, position, row)
        return logits


class RecordingRunner(ModelRunner):
    def __init__(self, model: RecordedModel, kv: KvCache, recording: Recording, **limits: Any) -> None:
        super().__init__(model, kv, **limits)
        self._recorded = model
        self._recording = recording

    def _compute(self, rows: Sequence[Row], stopwatch: Any) -> Any:
        self._recording.max_rows = max(self._recording.max_rows, len(rows))
        self._recorded.sampling = [
            (row.request_id, self._requests[row.request_id].output_position) for row in rows if row.sample
        ]
        return super()._compute(rows, stopwatch)


class RecordingBackend(InlineBackend):
    """Lets the engine plan as far ahead as it wants to before each step, and counts how often it did."""

    def __init__(self, model: Model, setup: ModelSetup, recording: Recording) -> None:
        self._recording = recording
        super().__init__(lambda: (_runner(model, setup, recording), WorkerInfo(device="inline")))

    async def receive(self) -> Answer:
        while not self._plans and self._runner is not None:
            self._wakeup = trio.Event()
            await self._wakeup.wait()
        await trio.testing.wait_all_tasks_blocked(0.0002)
        num_steps = sum(isinstance(order, StepPlan) for order in self._plans)
        self._recording.num_planned_ahead += num_steps > 1
        return await super().receive()


def _runner(model: Model, setup: ModelSetup, recording: Recording) -> RecordingRunner:
    """Pools begin full of NaN: whoever reads what nobody wrote is found out."""
    worker = setup.worker_settings()
    kernels.set_num_threads(worker.num_threads or 1)
    kv = KvCache.allocate(model.spec, worker.num_fa_blocks, worker.num_swa_blocks, worker.block_size)
    for cache in (*kv.keys, *kv.values):
        cache.fill_(float("nan"))
    return RecordingRunner(
        RecordedModel(model, recording),
        kv,
        recording,
        num_fa_blocks=worker.num_fa_blocks,
        num_swa_blocks=worker.num_swa_blocks,
        max_model_len=worker.max_model_len,
        max_num_seqs=worker.max_num_seqs,
        staging=setup.staging,
    )


def recorded_engine(files: ModelFiles, model: Model, **settings: Any) -> tuple[Engine, Recording]:
    """`model` was loaded from `files`; engines share its weights, each has pools of its own."""
    recording = Recording()
    engine = Engine(
        Settings(model=str(files.path), **settings),
        files=files,
        backend=lambda setup: RecordingBackend(model, setup, recording),
        threads=False,
    )
    return engine, recording
