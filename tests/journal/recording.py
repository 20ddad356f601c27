"""Journals of simulated engines, for tests: recorded in one process, on a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import trio

from ksana.costs.step_cost import LinearStepCost
from ksana.devices.simulated_worker import hashed_tokens
from ksana.journal.files import SegmentFiles
from ksana.journal.format import RecordedSettings
from ksana.journal.journal import Journal
from ksana.journal.recorder import JournalRecorder
from ksana.journal.redaction import Redaction
from ksana.messages.outputs import StepOutputs
from ksana.messages.requests import AddRequest, SamplingParams
from ksana.messages.steps import StepPlan
from ksana.runtime.actor import Address, Taps
from ksana.runtime.deterministic import run_deterministic
from ksana.runtime.virtual_clock import VirtualClock
from ksana.scheduling.status import SchedulerStatus
from ksana.stores.simulated import SimulatedStore
from simulations.engine import EngineSpec, SimulatedEngine
from simulations.smoke import break_now_and_then

VOCAB = 50_000
EOS = 2
ACTORS: tuple[Address, ...] = ("scheduler", "block_allocator", "swa_cache_manager", "remote_cache_loader")


class Run(msgspec.Struct, kw_only=True):
    """What was recorded."""

    num_requests: int
    num_ended: int
    status: SchedulerStatus
    prompts: list[tuple[int, ...]]
    outputs: dict[int, list[int]]
    stopped: str | None
    """Why the journal stopped by itself."""


def record(
    directory: Path,
    *,
    seed: int = 0,
    num_requests: int = 500,
    sliding_window: int | None = 32,
    segment_bytes: int = 512 << 10,
    max_bytes: int = 1 << 30,
    redaction_key: bytes | None = None,
    actors: tuple[Address, ...] = ACTORS,
    before_end: Callable[[SimulatedEngine], None] = lambda _engine: None,
    is_stopped: bool = False,
    is_calm: bool = False,
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> Run:
    """Requests with shared prefixes, aborts, stops and a tight pool; unless `is_calm`, a store that breaks
    and workers that crash. `changes`: other values for the engine's spec."""

    async def main() -> Run:
        return await _record(
            directory,
            seed,
            num_requests,
            sliding_window,
            segment_bytes,
            max_bytes,
            redaction_key,
            actors,
            before_end,
            is_stopped,
            is_calm,
            changes,
        )

    return run_deterministic(seed, main, VirtualClock())


async def _record(
    directory: Path,
    seed: int,
    num_requests: int,
    sliding_window: int | None,
    segment_bytes: int,
    max_bytes: int,
    redaction_key: bytes | None,
    actors: tuple[Address, ...],
    before_end: Callable[[SimulatedEngine], None],
    is_stopped: bool,
    is_calm: bool,
    changes: Mapping[str, Any],
) -> Run:
    rng, faults = random.Random(seed), random.Random(seed + 1)
    store = None if is_calm else SimulatedStore(seed + 2, latency_s=0.003, bytes_per_s=2e6)
    has_store = store is not None
    spec = EngineSpec(
        block_size=8,
        num_fa_blocks=90,
        num_swa_blocks=60 if sliding_window else 0,
        sliding_window=sliding_window,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        max_model_len=512,
        max_remote_loads=6,
        num_staging_slots=32,
    )
    spec = msgspec.structs.replace(spec, **changes)
    ended: set[int] = set()
    all_ended = trio.Event()
    outputs: dict[int, list[int]] = {}

    def listen(message: StepOutputs) -> None:
        for tokens in message.tokens:
            outputs.setdefault(tokens.request_id, []).extend(tokens.token_ids)
            if tokens.token_ids[-1] % 97 == 0:
                engine.stop(tokens.request_id, tokens.first_index + len(tokens.token_ids) - 1, "secret stop")
        ended.update(one.request_id for one in message.ended)
        if len(ended) == num_requests:
            all_ended.set()

    def fault(_number: int, _plan: StepPlan) -> str | None:
        return "planned crash" if not is_calm and faults.random() < 0.003 else None

    config = spec.cache_config(has_store=has_store)
    recorded = RecordedSettings(
        scheduler=spec.scheduler_settings(has_store=has_store),
        cache=config,
        loader=spec.loader_settings(config) if has_store else None,
        max_model_len=spec.max_model_len,
        vocab_size=VOCAB,
    )
    redaction = None if redaction_key is None else Redaction(redaction_key, config, VOCAB)
    there = {"scheduler", "block_allocator"}
    if sliding_window:
        there.add("swa_cache_manager")
    if has_store:
        there.add("remote_cache_loader")
    files = SegmentFiles(directory, max_bytes)
    recorder = JournalRecorder(
        settings=recorded,
        model_fingerprint="toy",
        actors=tuple(actor for actor in actors if actor in there),
        run=f"run{seed}",
        first_segment=files.next_number,
        segment_bytes=segment_bytes,
        redaction=redaction,
        wall_time_s=trio.current_time,
    )
    journal = Journal(recorder, files, threads=False)
    engine = SimulatedEngine(
        spec,
        cost=LinearStepCost(fixed_s=0.01, per_token_s=2e-4, per_attended_token_s=1e-6),
        tokens=hashed_tokens(VOCAB, EOS, mean_output_len=40),
        listener=listen,
        store=store,
        tap=Taps(recorder),
        fault=fault,
    )
    journal.begin(engine.cores.for_journal(engine.remote), trio.current_time())
    prompts: list[tuple[int, ...]] = []
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        stack.push_async_callback(journal.aclose)
        nursery.start_soon(journal.run)
        nursery.start_soon(engine.run)
        if store is not None:
            nursery.start_soon(break_now_and_then, store, faults)
        for request_id in range(1, num_requests + 1):
            await trio.sleep(rng.expovariate(25.0 if is_calm else 8.0))
            prompts.append(_prompt(rng))
            engine.add(_request(request_id, prompts[-1], rng))
            if rng.random() < 0.15:
                nursery.start_soon(_leave, engine, request_id, rng.expovariate(2.0))
        with trio.fail_after(10_000):
            await all_ended.wait()
        before_end(engine)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert is_stopped == (recorder.stopped is not None), recorder.stopped
    return Run(
        num_requests=num_requests,
        num_ended=len(ended),
        status=engine.status(),
        prompts=prompts,
        outputs=outputs,
        stopped=recorder.stopped,
    )


def _prompt(rng: random.Random) -> tuple[int, ...]:
    shared = random.Random(rng.randrange(6)).choices(range(1000, VOCAB), k=200)
    own = rng.choices(range(1000, VOCAB), k=rng.randint(1, 60))
    return (*shared[: rng.choice((0, 40, 100, 200))], *own)


def _request(request_id: int, prompt: tuple[int, ...], rng: random.Random) -> AddRequest:
    now_s = trio.current_time()
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(
            seed=rng.randrange(1 << 32),
            max_tokens=rng.randint(1, 80),
            min_tokens=rng.choice((0, 0, 3)),
            stop=("secret stop",),
            stop_token_ids=tuple(rng.choices(range(1000, VOCAB), k=2)),
            ignore_eos=rng.random() < 0.3,
        ),
        eos_token_ids=(EOS,),
        arrival_time_s=now_s,
        deadline_s=now_s + rng.choice((3.0, 1000.0, 1000.0, 1000.0)),
        cache_salt=rng.choice(("", "", "secret tenant")),
    )


def request_of(request_id: int, prompt: tuple[int, ...]) -> AddRequest:
    """A plain one, now."""
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(seed=1, max_tokens=5),
        eos_token_ids=(EOS,),
        arrival_time_s=trio.current_time(),
        deadline_s=trio.current_time() + 100,
    )


async def _leave(engine: SimulatedEngine, request_id: int, after_s: float) -> None:
    await trio.sleep(after_s)
    engine.abort(request_id)
