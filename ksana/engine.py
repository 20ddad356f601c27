"""Puts an engine together: finds the model, starts worker and actors, stops them again.

    async with Engine(Settings(model="smollm2-135m")) as engine:
        async for event in engine.generate(TextPrompt(text="Hello"), SamplingParams(seed=1)):
            ...

Nobody looks anyone up: each actor is handed where to send (`ksana.wiring`). With another backend and
clock the same engine is a simulation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

import trio

from ksana.actors.device_executor import DeviceExecutor
from ksana.actors.tokenizer import decode_ids, encode_prompt, run_tokenizer
from ksana.client import InProcessClient, SlotStream
from ksana.config import Settings
from ksana.devices.backend import Backend
from ksana.devices.process import ProcessBackend, Progress
from ksana.devices.staging import StagingMemory
from ksana.engine_status import EngineCounters, engine_status
from ksana.errors import RequestError, ServiceError
from ksana.journal.format import RecordedSettings
from ksana.journal.journal import Journal, open_journal
from ksana.messages.base import Message
from ksana.messages.outputs import Aborted, Ended, Failed, Outcome, Usage
from ksana.messages.requests import Drain, Prompt, SamplingParams
from ksana.messages.status import EngineStatus
from ksana.model_setup import ModelFiles, ModelSetup, Report, find_model, set_up
from ksana.remote_cache import RemoteCache, open_remote_store
from ksana.runtime.actor import Post, Tap, Taps
from ksana.runtime.clock import now_s
from ksana.runtime.restarts import RestartLimiter
from ksana.runtime.slots import Slots
from ksana.runtime.supervisor import supervise
from ksana.scheduling.scheduler import Scheduler
from ksana.stores.store import Store
from ksana.tokenizers.core import TokenizerCore
from ksana.tokenizers.prompts import PromptEncoder
from ksana.wiring import Cores, Mailboxes, MakeScheduler, run_deciders

log = logging.getLogger(__name__)

MAX_CRASHES = 3
CRASHES_WITHIN_S = 60.0
_END_GRACE_S = 5.0
"""How long the endings of the last requests may take to reach their producers."""
_STALLS_TO_REPLACE_WORKER = 2
"""Stall timeouts after which a silent worker is replaced; /health has told of it for one by then."""

MakeBackend = Callable[[ModelSetup], Backend]


class Engine:
    """A running engine, used by `async with`. `client` is the way in.

    Leaving the block drains: new requests are refused, running ones may take `drain_timeout` seconds, the
    rest fail with a 503; then the worker is stopped. All of it in bounded time; no process is left over.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        files: ModelFiles | None = None,
        backend: MakeBackend | None = None,
        tap: Tap | None = None,
        report: Report = log.info,
        progress: Progress | None = None,
        threads: bool = True,
        store: Store | None = None,
        check_messages: bool = False,
        make_scheduler: MakeScheduler = Scheduler,
        outputs: Post | None = None,
    ) -> None:
        """`files`: a model already found (or made up) instead of `settings.model`. `backend` makes another
        device than a worker process. `tap` is told of every activation of every actor. `report` and
        `progress` are told what takes time while loading. Without `threads` nothing runs beside the trio
        loop, as simulations need it. `store` is a remote cache instead of `settings.remote_cache`. With
        `check_messages` the cache's invariants are checked after every message, as tests need it.
        `make_scheduler`: with another policy, or measured. `outputs` takes what the scheduler says in the
        tokenizer's stead, for a producer that speaks ids and tells the scheduler itself (`tell_scheduler`).
        """
        if not isinstance(settings, Settings):
            raise TypeError(f"an engine wants Settings, not {type(settings).__name__}")
        self.settings = settings
        self._files = files
        self._make_backend = backend or self._process_backend
        self._tap = tap
        self._report = report
        self._progress = progress
        self._threads = threads
        self._store = store
        self._check_messages = check_messages
        self._make_scheduler = make_scheduler
        self._outputs = outputs
        self._remote: RemoteCache | None = None
        self._journal: Journal | None = None
        self._stack = AsyncExitStack()
        self._draining = False
        self._broken = False
        self._counters = EngineCounters()

    async def __aenter__(self) -> Self:
        """Load the model and start. Raises ConfigError, ModelLoadError or WorkerLostError."""
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._draining = True
        try:
            if error is None:
                await self._drain()
        finally:
            self._nursery.cancel_scope.cancel()
            # Not told of `error`: the nursery would wrap the caller's exception in a group.
            await self._stack.aclose()
            self._fail_unfinished(Aborted(reason="the engine was stopped"))

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        timeout_s: float | None = None,
        cache_salt: str = "",
    ) -> SlotStream:
        """The events of one request; see `ksana.client.Client.generate`."""
        return self.client.generate(prompt, sampling, timeout_s=timeout_s, cache_salt=cache_salt)

    def tell_scheduler(self, message: Message) -> None:
        """For a producer that speaks ids; see `outputs`."""
        self._mailboxes.scheduler.put(message)

    def status(self) -> EngineStatus:
        manager = self._cores.manager
        return engine_status(
            now_s=now_s(),
            scheduler=self._cores.scheduler.status(),
            fa_use=self._cores.allocator.fa.pool.use(),
            swa_use=manager.cache.pool.use() if manager is not None else None,
            executor=self._executor,
            slots=self._slots,
            counters=self._counters,
            broken=self._broken,
            draining=self._draining,
            remote=self._remote.status() if self._remote is not None else None,
            journal=self._journal.recorder.status() if self._journal is not None else None,
        )

    def refusal(self) -> ServiceError | None:
        """Why no new request is taken, or None."""
        if self._broken:
            return ServiceError(
                "the engine stopped after repeated internal errors", status=503, code="engine_broken"
            )
        if self._draining:
            return ServiceError("the server is shutting down", status=503, code="shutting_down")
        return None

    # Starting

    async def _start(self, stack: AsyncExitStack) -> None:
        if self._files is None:
            self._files = await trio.to_thread.run_sync(
                find_model, self.settings, self._report, abandon_on_cancel=True
            )
        stack.callback(self._files.tokenizer.close)
        self.setup = set_up(self.settings, self._files)
        self._open_remote_cache(stack)
        self._open_journal(stack)
        self._slots = Slots(self.settings.max_num_seqs + self.settings.max_queued_requests)
        self._mailboxes = Mailboxes(self._slots.capacity, self.settings.max_remote_loads)
        self._encoder = PromptEncoder(
            self._files.tokenizer,
            max_model_len=self.setup.max_model_len,
            vocab_size=self._files.spec.vocab_size,
        )
        self._make_cores()
        self._executor = DeviceExecutor(
            self._make_backend(self.setup),
            self._mailboxes.executor,
            scheduler=self._mailboxes.scheduler.put,
            step_timeout_s=_STALLS_TO_REPLACE_WORKER * float(self.settings.stall_timeout),
            remote_cache_loader=self._loader_post,
            tap=self._tap,
        )
        stack.push_async_callback(self._executor.stop)
        worker = await self._executor.start_first()
        self.client = InProcessClient(
            model=self.setup.model_info(worker),
            slots=self._slots,
            post=self._mailboxes.tokenizer.put,
            tokenizer=self,
            engine=self,
            default_timeout_s=float(self.settings.request_timeout),
        )
        self._nursery = await stack.enter_async_context(trio.open_nursery())
        if self._journal is not None:
            self._nursery.start_soon(self._journal.run)
        self._nursery.start_soon(self._supervise)

    def _open_remote_cache(self, stack: AsyncExitStack) -> None:
        store = self._store if self._store is not None else open_remote_store(self.settings)
        if store is None:
            return
        num_slots, slot_bytes = self.setup.staging_plan()
        staging = StagingMemory.create(num_slots, slot_bytes)
        self.setup = replace(self.setup, staging=staging)
        self._remote = RemoteCache(store, staging, self.setup.loader_settings(num_slots))
        stack.push_async_callback(self._remote.aclose)

    def _open_journal(self, stack: AsyncExitStack) -> None:
        setup = self.setup
        # End tokens may lie beyond the rows of the output layer; a redaction renames them, too.
        num_ids = max(setup.files.spec.vocab_size, *(i + 1 for i in setup.files.tokenizer.eos_ids), 1)
        recorded = RecordedSettings(
            scheduler=setup.scheduler_settings(),
            cache=setup.cache_config(),
            loader=self._remote.settings if self._remote is not None else None,
            max_model_len=setup.max_model_len,
            vocab_size=num_ids,
            model=self.settings.model,
        )
        self._journal = open_journal(
            self.settings, recorded, model_fingerprint=setup.files.fingerprint, threads=self._threads
        )
        if self._journal is not None:
            stack.push_async_callback(self._journal.aclose)
            recorder = self._journal.recorder
            self._tap = recorder if self._tap is None else Taps(self._tap, recorder)

    @property
    def _loader_post(self) -> Post | None:
        return self._mailboxes.remote_cache_loader.put if self._remote is not None else None

    def _make_cores(self) -> None:
        self._cores = Cores.fresh(
            self.setup.scheduler_settings(), self.setup.cache_config(), self._make_scheduler
        )
        self._tokenizer = TokenizerCore(self._encoder)

    def _process_backend(self, setup: ModelSetup) -> Backend:
        return ProcessBackend(
            setup.worker_settings(),
            model_fingerprint=setup.files.fingerprint,
            start_timeout_s=float(self.settings.worker_start_timeout),
            progress=self._progress,
        )

    # Running

    async def _supervise(self) -> None:
        limiter = RestartLimiter(MAX_CRASHES, CRASHES_WITHIN_S)
        self._broken = not await supervise(self._run_generation, self._on_crash, limiter)
        await self._executor.stop()

    async def _run_generation(self) -> None:
        """All actors, with fresh cores, until one breaks."""
        self._make_cores()
        if self._remote is not None:
            self._remote.renew()
        if self._journal is not None:
            tokenizer = self._tokenizer
            cores = self._cores.for_journal(self._remote) | {"tokenizer": lambda: tokenizer}
            self._journal.begin(cores, now_s())
        async with trio.open_nursery() as actors:
            actors.start_soon(self._run_tokenizer)
            actors.start_soon(self._run_deciders)
            actors.start_soon(self._executor.run)

    async def _run_tokenizer(self) -> None:
        await run_tokenizer(
            self._tokenizer,
            self._encoder,
            self._mailboxes.tokenizer,
            scheduler=self._mailboxes.scheduler.put,
            producer=self._slots.post,
            tap=self._tap,
            threads=self._threads,
        )

    async def _run_deciders(self) -> None:
        await run_deciders(
            self._cores,
            self._mailboxes,
            tokenizer=self._outputs or self._mailboxes.tokenizer.put,
            executor=self._mailboxes.executor.put,
            is_idle=lambda: self._outputs is None and not self._slots.unfinished(),
            remote=self._remote,
            tap=self._tap,
            check_messages=self._check_messages,
        )

    def _on_crash(self, _error: Exception) -> None:
        self._counters.add_generation(self._cores.scheduler.status())
        self._executor.forget_worker()
        self._mailboxes.clear()
        self._fail_unfinished(
            Failed(
                status=500, message="The request failed because of an internal error.", code="engine_error"
            )
        )

    def _fail_unfinished(self, outcome: Outcome) -> None:
        """The last resort for requests that no actor will end any more."""
        for request_id in self._slots.unfinished():
            usage = Usage(num_prompt_tokens=0, num_output_tokens=0)
            self._slots.post(Ended(request_id=request_id, outcome=outcome, usage=usage))

    # Stopping

    async def _drain(self) -> None:
        with trio.move_on_after(self.settings.drain_timeout):
            await self._slots.wait_finished()
        if self._slots.unfinished():
            self._mailboxes.scheduler.put(Drain())
            with trio.move_on_after(_END_GRACE_S):
                await self._slots.wait_finished()

    # What the client asks of the tokenizer outside of a request

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        return await encode_prompt(self._encoder, prompt)

    async def detokenize(self, token_ids: tuple[int, ...], skip_special_tokens: bool) -> str:
        self._encoder.check_ids(token_ids)
        if len(token_ids) > self.setup.max_model_len:
            raise RequestError(
                f"{len(token_ids)} tokens are more than the context of {self.setup.max_model_len}",
                param="tokens",
            )
        return decode_ids(self._encoder.tokenizer, token_ids, skip_special_tokens)
