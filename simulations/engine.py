"""One engine of a simulated world: real scheduler, allocator, SWA manager and loader; simulated executor.

There is no tokenizer, no slot and no task per request: whoever asks adds requests and is called with what
the scheduler says to the tokenizer, one `StepOutputs` per step.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import trio

from ksana.actors.device_executor import DeviceExecutor
from ksana.cache.cache_config import CacheConfig, SwaEviction
from ksana.costs.step_cost import StepCost
from ksana.devices.simulated import Fault, SimulatedBackend, StartFault
from ksana.devices.simulated_worker import SimulatedWorker, TokenSource, simulated_block_bytes
from ksana.devices.staging import StagingMemory
from ksana.errors import InvariantViolated
from ksana.loading.settings import LoaderSettings
from ksana.messages.base import Message, RequestId
from ksana.messages.outputs import StepOutputs
from ksana.messages.requests import Abort, AddRequest, StopStringFound
from ksana.remote_cache import RemoteCache
from ksana.runtime.actor import Post, Tap
from ksana.runtime.direct_mailbox import DirectMailbox
from ksana.runtime.mailbox import Mailbox
from ksana.scheduling.settings import Admission, SchedulerSettings
from ksana.scheduling.status import SchedulerStatus
from ksana.stores.store import Store
from ksana.wiring import Cores, Mailboxes, run_deciders
from simulations.executor import LeanExecutor
from simulations.fast_worker import FastWorker

STORE_IDENTITY = b"simulated"
"""What chain keys of simulated KV start from."""


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes and rules of one engine, as `ksana serve` would have decided on them. Lengths in tokens."""

    block_size: int = 16
    num_fa_blocks: int = 1024
    num_swa_blocks: int = 0
    sliding_window: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int = 8192
    max_queued_requests: int = 100_000
    admission: Admission = "room_to_grow"
    hold_when_short: bool = False
    plan_ahead: bool = True
    enable_prefix_caching: bool = True
    window_open_at_start: bool = True
    swa_eviction: SwaEviction = "lfu"
    max_remote_loads: int = 8
    remote_load_timeout_s: float = 5.0
    remote_write_back: bool = True
    num_staging_slots: int = 64
    start_time_s: float = 2.0
    """Of a worker that takes a lost one's place."""
    step_timeout_s: float = 120.0

    @property
    def num_slots(self) -> int:
        """Requests that may be open at once."""
        return self.max_num_seqs + self.max_queued_requests

    def cache_config(self, *, has_store: bool, identity: bytes = STORE_IDENTITY) -> CacheConfig:
        return CacheConfig(
            block_size=self.block_size,
            num_fa_blocks=self.num_fa_blocks,
            num_swa_blocks=self.num_swa_blocks,
            sliding_window=self.sliding_window,
            enable_prefix_caching=self.enable_prefix_caching,
            window_open_at_start=self.window_open_at_start,
            swa_eviction=self.swa_eviction,
            plan_ahead=self.plan_ahead,
            write_back=has_store and self.remote_write_back,
            chain_identity=identity,
        )

    def scheduler_settings(self, *, has_store: bool) -> SchedulerSettings:
        return SchedulerSettings(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            sliding_window=self.sliding_window,
            admission=self.admission,
            hold_when_short=self.hold_when_short,
            plan_ahead=self.plan_ahead,
            max_remote_loads=self.max_remote_loads if has_store else 0,
            remote_load_timeout_s=self.remote_load_timeout_s,
        )

    def loader_settings(self, config: CacheConfig) -> LoaderSettings:
        block_bytes = simulated_block_bytes(self.block_size)
        return LoaderSettings(
            identity=config.chain_identity,
            block_size=self.block_size,
            fa_block_bytes=block_bytes,
            swa_block_bytes=block_bytes if config.has_swa else 0,
            window_blocks=config.window_blocks if config.has_swa else 0,
            window_open_at_start=self.window_open_at_start,
            num_slots=self.num_staging_slots,
            write_back=self.remote_write_back,
        )


class DirectMailboxes(Mailboxes):
    """The two allocators, which have no timers, are activated without a task."""

    def __init__(self, num_slots: int, num_loads: int) -> None:
        super().__init__(num_slots, num_loads)
        for name in ("block_allocator", "swa_cache_manager"):
            usual: Mailbox[Message] = getattr(self, name)
            direct: DirectMailbox[Message] = DirectMailbox(usual.name, usual.capacity)
            setattr(self, name, direct)


class SimulatedEngine:
    """`run` it in the nursery of a world, then `add` requests. What an actor raises comes out of `run`."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        cost: StepCost,
        tokens: TokenSource,
        listener: Callable[[StepOutputs], None],
        store: Store | None = None,
        tap: Tap | None = None,
        check_messages: bool = False,
        fault: Fault | None = None,
        start_fault: StartFault | None = None,
        mailboxes: Mailboxes | None = None,
        fast: bool = False,
        host_s: float = 0.0,
    ) -> None:
        """`tokens`: what the model answers. `listener` is told in the scheduler's task, and may call `abort`
        and `stop`. With a `store` the engine has a remote cache; the store is the caller's to close.
        `mailboxes`: others than usual, for instance slow ones. `fast`: the device keeps no KV content and
        checks nothing; times and tokens are the same. `host_s`: from a step's end to the begin of the next,
        where that was not planned ahead."""
        self.spec = spec
        config = spec.cache_config(has_store=store is not None)
        self.cores = Cores.fresh(spec.scheduler_settings(has_store=store is not None), config)
        is_lean = fast and mailboxes is None
        kind = DirectMailboxes if is_lean else Mailboxes
        self.mailboxes = mailboxes or kind(spec.num_slots, spec.max_remote_loads)
        self._listener = listener
        self._tap = tap
        self._check_messages = check_messages
        self._num_open = 0
        self.remote: RemoteCache | None = None
        staging: StagingMemory | None = None
        if store is not None:
            staging = StagingMemory.create(spec.num_staging_slots, simulated_block_bytes(spec.block_size))
            self.remote = RemoteCache(store, staging, spec.loader_settings(config))
        self.backend = SimulatedBackend(
            lambda: FastWorker(tokens) if fast else SimulatedWorker.of_cache(config, tokens, staging),
            cost=cost,
            start_time_s=spec.start_time_s,
            is_up_at_first=True,
            fault=fault,
            start_fault=start_fault,
            host_s=host_s,
        )
        scheduler = self.mailboxes.scheduler.put
        loader = self.mailboxes.remote_cache_loader.put if self.remote is not None else None
        self.executor: DeviceExecutor
        self._executor_post: Post
        if is_lean:
            lean = LeanExecutor(
                self.backend,
                scheduler=scheduler,
                step_timeout_s=spec.step_timeout_s,
                remote_cache_loader=loader,
                tap=tap,
            )
            self.executor, self._executor_post = lean, lean.post
        else:
            self.executor = DeviceExecutor(
                self.backend,
                self.mailboxes.executor,
                scheduler=scheduler,
                step_timeout_s=spec.step_timeout_s,
                remote_cache_loader=loader,
                tap=tap,
            )
            self._executor_post = self.mailboxes.executor.put

    async def run(self) -> None:
        """Serve until cancelled. The first worker stands ready; requests may be added before."""
        try:
            await self.executor.start_first()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.executor.run)
                await run_deciders(
                    self.cores,
                    self.mailboxes,
                    tokenizer=self._take_outputs,
                    executor=self._executor_post,
                    is_idle=lambda: self._num_open == 0,
                    remote=self.remote,
                    tap=self._tap,
                    check_messages=self._check_messages,
                )
        finally:
            with trio.CancelScope(shield=True):
                await self.executor.stop()
            if self.remote is not None:
                self.remote.staging.close()

    def add(self, request: AddRequest) -> None:
        """The id must be higher than all before. Whoever asks keeps to the bound on open requests."""
        self._num_open += 1
        self.mailboxes.scheduler.put(request)

    def abort(self, request_id: RequestId) -> None:
        self.mailboxes.scheduler.put(Abort(request_id=request_id))

    def stop(self, request_id: RequestId, token_index: int, stop_string: str) -> None:
        """A stop string ended with that output token."""
        self.mailboxes.scheduler.put(
            StopStringFound(request_id=request_id, token_index=token_index, stop_string=stop_string)
        )

    def crash_worker(self, reason: str) -> None:
        """The worker dies now, and is replaced as in a real engine."""
        self.backend.kill(reason)

    def slow_worker(self, factor: float) -> None:
        """Steps take so many times as long from the next one on; 1 ends it."""
        self.backend.slowdown = factor

    def status(self) -> SchedulerStatus:
        return self.cores.scheduler.status()

    @property
    def num_open(self) -> int:
        """Requests added and not ended."""
        return self._num_open

    def _take_outputs(self, message: Message) -> None:
        if not isinstance(message, StepOutputs):
            raise InvariantViolated(f"a {type(message).__name__} for the tokenizer")
        self._num_open -= len(message.ended)
        self._listener(message)
