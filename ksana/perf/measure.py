"""Starts an engine, lets the performance backend measure batches on it, stops it: a `PerfResult`."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import signal
from collections.abc import Sequence

import msgspec
import trio

from ksana.config import Settings
from ksana.devices.process import Progress
from ksana.engine import Engine, MakeBackend
from ksana.host_memory import available_memory_bytes
from ksana.model_setup import ModelFiles, Report, decide_kv_bytes, set_up
from ksana.perf.backend import ModelPerfBackend, OnRound
from ksana.perf.batch_run import Rounds
from ksana.perf.batches import Batch
from ksana.perf.limits import Limits
from ksana.perf.result import PerfResult
from ksana.runtime.clock import now_s

_PACKAGES = ("ksana", "torch", "numpy")


def fixed_settings(settings: Settings) -> Settings:
    """With the size of the KV pools decided, so that the engine decides as whoever checked before: a default
    depends on how much memory is free. Raises ConfigError."""
    kv_bytes = decide_kv_bytes(settings.kv_cache_memory, available_memory_bytes())
    return msgspec.structs.replace(settings, kv_cache_memory=str(kv_bytes))


def limits_of(settings: Settings, files: ModelFiles) -> Limits:
    """What an engine with these (fixed) settings can run. Raises ConfigError."""
    setup = set_up(settings, files)
    return Limits(
        max_model_len=setup.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        cache=setup.cache_config(),
    )


async def measure(
    settings: Settings,
    files: ModelFiles,
    batches: Sequence[Batch],
    *,
    rounds: Rounds,
    seed: int,
    num_passes: int = 1,
    time_limit_s: float | None = None,
    on_round: OnRound | None = None,
    report: Report = lambda _text: None,
    progress: Progress | None = None,
    backend: MakeBackend | None = None,
    signals: Sequence[signal.Signals] = (),
) -> PerfResult:
    """Run every batch, `num_passes` times. A batch that fails has an `error`; the engine's failure to start
    is raised (ModelLoadError, WorkerLostError).

    `signals`: one of these, once batches run, ends the measurement; the batches that were complete by then
    are the result, which says so. `time_limit_s`, counted from when the model is loaded: batches that have
    not begun by then are skipped.
    """
    perf = ModelPerfBackend(
        batches,
        rounds=rounds,
        seed=seed,
        vocab_size=files.spec.vocab_size,
        num_passes=num_passes,
        on_round=on_round,
    )
    engine = Engine(
        settings,
        files=files,
        report=report,
        progress=progress,
        backend=backend,
        make_scheduler=perf.make_scheduler,
        outputs=perf.take_outputs,
    )
    async with engine:
        until_s = None if time_limit_s is None else now_s() + time_limit_s
        interrupted = await _run_until_signal(perf, engine, until_s, signals)
        results = perf.results
        setup = engine.setup
        model = engine.client.model
    return PerfResult(
        model=model.name,
        model_fingerprint=model.fingerprint,
        device=re.sub(r", process \d+$", "", model.device),
        dtype=model.dtype,
        parallel_sizes={"data": 1, "pipeline": 1, "tensor": 1},
        block_size=model.block_size,
        versions=_versions(),
        plan_ahead=setup.plan_ahead,
        seed=seed,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=setup.max_model_len,
        batches=tuple(results),
        skipped=tuple(batch.name for batch in batches[len(results) :]),
        interrupted=interrupted,
    )


async def _run_until_signal(
    perf: ModelPerfBackend, engine: Engine, until_s: float | None, signals: Sequence[signal.Signals]
) -> str | None:
    """The name of the signal that came first, if one did."""
    if not signals:
        await perf.start_perf(engine, until_s=until_s)
        return None
    came: list[str] = []
    with trio.open_signal_receiver(*signals) as received:
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                async for number in received:
                    came.append(signal.Signals(number).name)
                    nursery.cancel_scope.cancel()
                    return

            nursery.start_soon(watch)
            await perf.start_perf(engine, until_s=until_s)
            nursery.cancel_scope.cancel()
    return came[0] if came else None


def _versions() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **versions}
