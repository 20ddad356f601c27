"""Makes the real runner: loads the model, allocates its pools. Torch; only workers and tests import this."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from ksana import kernels
from ksana.devices.backend import WorkerInfo, WorkerSettings
from ksana.devices.runner import ModelRunner
from ksana.devices.staging import StagingMemory
from ksana.devices.threads import default_num_threads
from ksana.devices.worker import Progress
from ksana.errors import ModelLoadError
from ksana.models.batch import KvCache
from ksana.models.load import fingerprint
from ksana.models.loader import load_model


def build_runner(
    settings: WorkerSettings, expected_fingerprint: str, progress: Progress
) -> tuple[ModelRunner, WorkerInfo]:
    """Load `settings.model_path`. Raises ModelLoadError when it cannot be loaded, when its files are not
    those that the engine saw, or when the pools do not fit into memory."""
    began_s = time.monotonic()
    num_threads = settings.num_threads or default_num_threads()
    torch.set_num_threads(num_threads)
    kernels.set_num_threads(num_threads)
    path = Path(settings.model_path)
    if expected_fingerprint and fingerprint(path) != expected_fingerprint:
        raise ModelLoadError(f"{path}: the model's files changed since the engine started")
    model = load_model(path, progress, settings.max_model_len)
    try:
        kv = KvCache.allocate(
            model.spec, settings.num_fa_blocks, settings.num_swa_blocks, settings.block_size
        )
    except (RuntimeError, MemoryError) as error:
        raise ModelLoadError(
            f"the KV pools do not fit into memory: {error}; ask for less with --kv-cache-memory"
        ) from error
    runner = ModelRunner(
        model,
        kv,
        num_fa_blocks=settings.num_fa_blocks,
        num_swa_blocks=settings.num_swa_blocks,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        staging=None if settings.staging is None else StagingMemory.attach(settings.staging),
    )
    info = WorkerInfo(
        device=f"CPU, {kernels.describe()}, process {os.getpid()}",
        kv_cache_bytes=sum(cache.nbytes for cache in (*kv.keys, *kv.values)),
        load_time_s=time.monotonic() - began_s,
    )
    return runner, info
