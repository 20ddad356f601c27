"""The one place where everything is wired: opens mailboxes, starts actors, stops them again.

    async with Engine(Settings(model="smollm2-135m")) as engine:
        async for event in engine.generate(TextPrompt(text="Hello"), SamplingParams(seed=1)):
            ...

Nobody looks anyone up: each actor is handed where to send. With another backend, tokenizer and clock the
same wiring is the simulator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

import trio

from ksana.actors.block_allocator import run_block_allocator
from ksana.actors.device_executor import DeviceExecutor
from ksana.actors.scheduler import run_scheduler
from ksana.actors.swa_cache_manager import run_swa_cache_manager
from ksana.actors.tokenizer import encode_prompt, run_tokenizer
from ksana.cache.block_allocator import BlockAllocator
from ksana.cache.swa_manager import SWACacheManager
from ksana.client import InProcessClient, SlotStream
from ksana.config import Settings
from ksana.devices.backend import Backend
from ksana.devices.process import ProcessBackend, Progress
from ksana.devices.staging import StagingMemory
from ksana.engine_checks import CheckedCore, check_when_idle
from ksana.engine_status import EngineCounters, engine_status
from ksana.errors import RequestError, ServiceError
from ksana.messages.base import Message
from ksana.messages.outputs import Aborted, Ended, Failed, Outcome, Usage
from ksana.messages.requests import Drain, Prompt, SamplingParams
from ksana.messages.status import EngineStatus
from ksana.model_setup import ModelFiles, ModelSetup, Report, find_model, set_up
from ksana.remote_cache import RemoteCache, open_remote_store
from ksana.runtime.actor import Post, Tap
from ksana.runtime.clock import now_s
from ksana.runtime.mailbox import Mailbox
from ksana.runtime.restarts import RestartLimiter
from ksana.runtime.slots import Slots
from ksana.runtime.supervisor import supervise
from ksana.scheduling.scheduler import Scheduler
from ksana.stores.store import Store
from ksana.tokenizers.core import TokenizerCore
from ksana.tokenizers.prompts import PromptEncoder

log = logging.getLogger(__name__)

MAX_CRASHES = 3
CRASHES_WITHIN_S = 60.0
_END_GRACE_S = 5.0
"""How long the endings of the last requests may take to reach their producers."""
_STALLS_TO_REPLACE_WORKER = 2
"""Stall timeouts after which a silent worker is replaced; /health has told of it for one by then."""
_MESSAGES_PER_SLOT = 4
"""Of one request, at most: Generate, PromptEncoded and Abort in the tokenizer's mailbox; AddRequest, Abort
and StopStringFound in the scheduler's."""
_MESSAGES_PER_LOAD = 4
"""Of one remote load, at most, in the allocator's mailbox: a call, a drop, and the same of the load that
took its place before the allocator came to read them."""
_OTHER_MESSAGES = 1024
"""Of steps, plans and workers; a handful in practice, since each is answered before the next is sent."""

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
    ) -> None:
        """`files`: a model already found (or made up) instead of `settings.model`. `backend` makes another
        device than a worker process. `tap` is told of every activation of every actor. `report` and
        `progress` are told what takes time while loading. Without `threads` nothing runs beside the trio
        loop, as simulations need it. `store` is a remote cache instead of `settings.remote_cache`. With
        `check_messages` the cache's invariants are checked after every message, as tests need it.
        """
        self.settings = settings
        self._files = files
        self._make_backend = backend or self._process_backend
        self._tap = tap
        self._report = report
        self._progress = progress
        self._threads = threads
        self._store = store
        self._check_messages = check_messages
        self._remote: RemoteCache | None = None
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

    def status(self) -> EngineStatus:
        return engine_status(
            now_s=now_s(),
            scheduler=self._scheduler.status(),
            fa_use=self._allocator.fa.pool.use(),
            swa_use=self._manager.cache.pool.use() if self._manager is not None else None,
            executor=self._executor,
            slots=self._slots,
            counters=self._counters,
            broken=self._broken,
            draining=self._draining,
            remote=self._remote.status() if self._remote is not None else None,
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
        self.setup = set_up(self.settings, self._files)
        self._open_remote_cache(stack)
        self._slots = Slots(self.settings.max_num_seqs + self.settings.max_queued_requests)
        for_requests = _MESSAGES_PER_SLOT * self._slots.capacity + _OTHER_MESSAGES
        self._to_tokenizer: Mailbox[Message] = Mailbox("tokenizer", for_requests)
        self._to_scheduler: Mailbox[Message] = Mailbox("scheduler", for_requests)
        for_loads = _MESSAGES_PER_LOAD * self.settings.max_remote_loads + _OTHER_MESSAGES
        self._to_allocator: Mailbox[Message] = Mailbox("block_allocator", for_loads)
        self._to_swa: Mailbox[Message] = Mailbox("swa_cache_manager", for_loads)
        self._to_executor: Mailbox[Message] = Mailbox("executor", _OTHER_MESSAGES)
        self._to_loader: Mailbox[Message] = Mailbox("remote_cache_loader", for_requests)
        self._encoder = PromptEncoder(
            self._files.tokenizer,
            max_model_len=self.setup.max_model_len,
            vocab_size=self._files.spec.vocab_size,
        )
        self._make_cores()
        self._executor = DeviceExecutor(
            self._make_backend(self.setup),
            self._to_executor,
            scheduler=self._to_scheduler.put,
            step_timeout_s=_STALLS_TO_REPLACE_WORKER * float(self.settings.stall_timeout),
            remote_cache_loader=self._loader_post,
            tap=self._tap,
        )
        stack.push_async_callback(self._executor.stop)
        worker = await self._executor.start_first()
        self.client = InProcessClient(
            model=self.setup.model_info(worker),
            slots=self._slots,
            post=self._to_tokenizer.put,
            tokenizer=self,
            engine=self,
            default_timeout_s=float(self.settings.request_timeout),
        )
        self._nursery = await stack.enter_async_context(trio.open_nursery())
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

    @property
    def _loader_post(self) -> Post | None:
        return self._to_loader.put if self._remote is not None else None

    def _make_cores(self) -> None:
        config = self.setup.cache_config()
        self._scheduler = Scheduler(self.setup.scheduler_settings())
        self._allocator = BlockAllocator(config)
        self._manager = SWACacheManager(config) if config.has_swa else None

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
        allocator, manager = self._allocator, self._manager
        async with trio.open_nursery() as actors:

            async def tokenizer() -> None:
                await run_tokenizer(
                    TokenizerCore(self._encoder),
                    self._encoder,
                    self._to_tokenizer,
                    scheduler=self._to_scheduler.put,
                    producer=self._slots.post,
                    tap=self._tap,
                    threads=self._threads,
                )

            async def scheduler() -> None:
                await run_scheduler(
                    self._scheduler,
                    self._to_scheduler,
                    tokenizer=self._to_tokenizer.put,
                    block_allocator=self._to_allocator.put,
                    executor=self._to_executor.put,
                    remote_cache_loader=self._loader_post,
                    tap=self._tap,
                )

            async def block_allocator() -> None:
                await run_block_allocator(
                    CheckedCore(allocator) if self._check_messages else allocator,
                    self._to_allocator,
                    scheduler=self._to_scheduler.put,
                    swa_cache_manager=self._to_swa.put,
                    remote_cache_loader=self._loader_post,
                    tap=self._tap,
                )

            async def swa_cache_manager(core: SWACacheManager) -> None:
                await run_swa_cache_manager(
                    CheckedCore(core) if self._check_messages else core,
                    self._to_swa,
                    block_allocator=self._to_allocator.put,
                    tap=self._tap,
                )

            async def remote_cache_loader(remote: RemoteCache) -> None:
                await remote.run(
                    self._to_loader,
                    scheduler=self._to_scheduler.put,
                    block_allocator=self._to_allocator.put,
                    executor=self._to_executor.put,
                    tap=self._tap,
                )

            actors.start_soon(tokenizer)
            actors.start_soon(scheduler)
            actors.start_soon(block_allocator)
            if manager is not None:
                actors.start_soon(swa_cache_manager, manager)
            if self._remote is not None:
                actors.start_soon(remote_cache_loader, self._remote)
            actors.start_soon(self._executor.run)
            actors.start_soon(
                check_when_idle,
                allocator,
                manager,
                lambda: self._scheduler.status().last_step_id,
                self._is_idle,
            )

    def _is_idle(self) -> bool:
        """Nothing to do, and nothing on its way between the allocators."""
        return not (self._slots.unfinished() or len(self._to_allocator) or len(self._to_swa))

    def _on_crash(self, _error: Exception) -> None:
        self._counters.add_generation(self._scheduler.status())
        self._executor.forget_worker()
        for mailbox in self._mailboxes():
            mailbox.clear()
        self._fail_unfinished(
            Failed(
                status=500, message="The request failed because of an internal error.", code="engine_error"
            )
        )

    def _mailboxes(self) -> tuple[Mailbox[Message], ...]:
        return (
            self._to_tokenizer,
            self._to_scheduler,
            self._to_allocator,
            self._to_swa,
            self._to_executor,
            self._to_loader,
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
            self._to_scheduler.put(Drain())
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
        return self._encoder.tokenizer.decode(token_ids, skip_special_tokens)
