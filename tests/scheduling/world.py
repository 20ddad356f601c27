"""A world for a scheduler: the real allocators, and a worker that writes hashes instead of KV.

Messages wait in queues, so that a test decides in which order they are delivered. The worker's "KV" of a
token is a hash of the whole prefix up to it; before it gives a token it reads back every position that
attention would read. So a block that was given away, not written or cut off the table shows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ksana.cache.block_allocator import BlockAllocator
from ksana.cache.cache_config import CacheConfig
from ksana.loading.remote_cache_loader import RemoteCacheLoader
from ksana.messages.base import Message, RequestId
from ksana.messages.outputs import Finished, RequestEnded, StepOutputs
from ksana.messages.requests import AddRequest, SamplingParams
from ksana.messages.staging import CopyFromStaging, CopyToStaging, StagingCopied
from ksana.messages.steps import (
    NewRow,
    Row,
    RowResult,
    StepDone,
    StepPlan,
    StepTimes,
    WorkerLost,
    WorkerReady,
)
from ksana.scheduling.scheduler import Scheduler
from ksana.scheduling.settings import SchedulerSettings
from tests.scheduling.fake_loader import FakeLoader
from tests.scheduling.slot_store import SlotStore, loader_settings

ACTORS = ("scheduler", "block_allocator", "swa_cache_manager", "executor", "remote_cache_loader", "store")
EOS = 1
BLOCK_SIZE = 4
TIMES = StepTimes(prepare_ns=0, forward_ns=0, sample_ns=0)
Poison = Callable[[Row], bool]


def scripted_token(request_id: RequestId, output_index: int) -> int:
    """What the worker samples: never EOS."""
    return 10 + (request_id * 7919 + output_index * 104729) % 50_000


class WorkerRequest:
    """What the worker keeps of one request."""

    def __init__(self, new: NewRow) -> None:
        self.new = new
        self.token_ids = list(new.token_ids)
        self.chain: list[int] = []
        self.tables: dict[str, dict[int, int]] = {"fa": {}, "swa": {}}

    def kv(self, position: int) -> int:
        """The hash that stands for the KV of a position."""
        while len(self.chain) <= position:
            before = self.chain[-1] if self.chain else 0
            self.chain.append(hash((before, self.token_ids[len(self.chain)])))
        return self.chain[position]


class Worker:
    """Runs steps; checks that every plan makes sense to a worker that knows only what it was told."""

    def __init__(self, epoch: int, window: int | None, ends: dict[RequestId, int]) -> None:
        self.epoch = epoch
        self.window = window
        self.ends = ends
        """Output index at which a request samples EOS."""
        self.requests: dict[RequestId, WorkerRequest] = {}
        self.memory: dict[str, dict[tuple[int, int], int]] = {"fa": {}, "swa": {}}
        self.last_step_id = 0

    def run(self, plan: StepPlan, errors: dict[RequestId, str]) -> StepDone:
        assert plan.pool_epoch == self.epoch
        assert plan.step_id > self.last_step_id
        assert plan.rows
        self.last_step_id = plan.step_id
        for request_id in plan.drop:
            del self.requests[request_id]
        for new in plan.new:
            assert new.request_id not in self.requests
            self.requests[new.request_id] = WorkerRequest(new)
        for edits in plan.edits:
            self._edit(edits.request_id, "fa", edits.fa_edits)
            self._edit(edits.request_id, "swa", edits.swa_edits)
        assert not plan.copies
        named = [row.request_id for row in plan.rows]
        assert len(set(named)) == len(named)
        for row in plan.rows:
            self._write(row)
        results = tuple(self._sample(row, errors.get(row.request_id)) for row in plan.rows)
        return StepDone(pool_epoch=self.epoch, step_id=plan.step_id, results=results, times=TIMES)

    def _edit(self, request_id: RequestId, pool: str, edits: tuple) -> None:
        for edit in edits:
            self.requests[request_id].tables[pool][edit.index] = edit.block_id

    def _write(self, row: Row) -> None:
        request = self.requests[row.request_id]
        self._edit(row.request_id, "fa", row.fa_edits)
        self._edit(row.request_id, "swa", row.swa_edits)
        end = row.start + row.num_tokens
        assert row.num_tokens > 0
        assert end <= len(request.token_ids)
        assert row.sample == (end == len(request.token_ids))
        for position in range(row.start, end):
            place = divmod(position, BLOCK_SIZE)
            if position >= row.fa_write_start:
                self.memory["fa"][request.tables["fa"][place[0]], place[1]] = request.kv(position)
            if self.window is not None:
                self.memory["swa"][request.tables["swa"][place[0]], place[1]] = request.kv(position)

    def _sample(self, row: Row, error: str | None) -> RowResult:
        request = self.requests[row.request_id]
        end = row.start + row.num_tokens
        for position in range(end):
            place = divmod(position, BLOCK_SIZE)
            fa = self.memory["fa"].get((request.tables["fa"][place[0]], place[1]))
            assert fa == request.kv(position), f"FA KV of {row.request_id} at {position}"
        if self.window is not None:
            for position in range(max(0, row.start - self.window + 1), end):
                place = divmod(position, BLOCK_SIZE)
                swa = self.memory["swa"].get((request.tables["swa"][place[0]], place[1]))
                assert swa == request.kv(position), f"SWA KV of {row.request_id} at {position}"
        if error is not None:
            if row.sample:
                request.token_ids.append(0)
            return RowResult(request_id=row.request_id, error=error)
        if not row.sample:
            return RowResult(request_id=row.request_id)
        output_index = len(request.token_ids) - request.new.prompt_len
        token_id = scripted_token(row.request_id, output_index)
        if output_index == self.ends.get(row.request_id) and output_index >= request.new.sampling.min_tokens:
            token_id = EOS
        request.token_ids.append(token_id)
        return RowResult(request_id=row.request_id, token_ids=(token_id,))


class World:
    """Scheduler, allocators and a worker, with queues between them. Checks what producers are told."""

    def __init__(
        self,
        num_blocks: int = 64,
        window: int | None = None,
        num_swa_blocks: int = 0,
        prefix_caching: bool = True,
        start: bool = True,
        loader_seed: int | None = None,
        real_loader: bool = False,
        **settings: int | bool | str,
    ) -> None:
        """With a `loader_seed` there is a remote cache: see `fake_loader` and `slot_store`."""
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 200, **settings}
        if loader_seed is not None:
            limits = {"max_remote_loads": 3, **limits}
        self.scheduler = Scheduler(
            SchedulerSettings(block_size=BLOCK_SIZE, sliding_window=window, **limits)  # type: ignore[arg-type]
        )
        config = CacheConfig(
            block_size=BLOCK_SIZE,
            num_fa_blocks=num_blocks,
            num_swa_blocks=num_swa_blocks,
            sliding_window=window,
            enable_prefix_caching=prefix_caching,
            plan_ahead=self.scheduler.settings.plan_ahead,
            write_back=loader_seed is not None,
            chain_identity=b"tests",
        )
        self.cores: dict[str, Any] = {"block_allocator": BlockAllocator(config)}
        if window is not None:
            from ksana.cache.swa_manager import SWACacheManager

            self.cores["swa_cache_manager"] = SWACacheManager(config)
        self.loader: FakeLoader | None = None
        self.real_loader: RemoteCacheLoader | None = None
        self.store = SlotStore(loader_seed or 0)
        window_blocks = config.window_blocks if window else 0
        if real_loader:
            loader = RemoteCacheLoader(loader_settings(BLOCK_SIZE, window_blocks))
            self.cores["remote_cache_loader"] = self.real_loader = loader
        elif loader_seed is not None:
            self.loader = FakeLoader(loader_seed, BLOCK_SIZE, window_blocks)
            self.cores["remote_cache_loader"] = self.loader
        self.now_s = 0.0
        self.inboxes: dict[str, list[Message]] = {name: [] for name in ACTORS}
        self.ends: dict[RequestId, int] = {}
        self.errors: dict[RequestId, str] = {}
        self.poison: Poison | None = None
        self.worker: Worker | None = None
        self.epoch = 0
        self.num_crashes = 0
        self.steps: list[StepPlan] = []
        """Every plan the executor was sent."""
        self.added: dict[RequestId, AddRequest] = {}
        self.tokens: dict[RequestId, list[int]] = {}
        self.ended: dict[RequestId, RequestEnded] = {}
        if start:
            self.start_worker()

    # What happens

    def start_worker(self) -> None:
        self.epoch += 1
        self.worker = Worker(self.epoch, self.scheduler.settings.sliding_window, self.ends)
        self.inboxes["scheduler"].append(WorkerReady(pool_epoch=self.epoch))

    def crash(self, restarting: bool = True) -> None:
        assert self.worker is not None
        self.worker = None
        self.num_crashes += 1
        self.inboxes["executor"].clear()
        self.inboxes["scheduler"] = [m for m in self.inboxes["scheduler"] if not isinstance(m, StepDone)]
        self.inboxes["scheduler"].append(
            WorkerLost(pool_epoch=self.epoch, reason="killed by signal 9", restarting=restarting)
        )

    def add(
        self,
        request_id: RequestId,
        prompt_len: int = 5,
        max_tokens: int = 8,
        deadline_s: float = 1e9,
        prompt: tuple[int, ...] | None = None,
        **sampling: object,
    ) -> None:
        """A request, delivered at once. Without a prompt its first token is its own: no shared prefixes."""
        if prompt is None:
            prompt = tuple(100_000 + request_id * 1000 + i for i in range(prompt_len))
        message = AddRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=SamplingParams(seed=1, max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
            eos_token_ids=(EOS,),
            arrival_time_s=self.now_s,
            deadline_s=deadline_s,
        )
        self.added[request_id] = message
        self.tell(message)

    def tell(self, *messages: Message) -> None:
        """Activate the scheduler with these messages now, before anything that waits for it."""
        said = self.scheduler.handle(self.now_s, messages)
        assert sum(isinstance(message, StepOutputs) for _, message in said) <= 1
        for address, message in said:
            if isinstance(message, StepOutputs):
                self._listen(message)
            else:
                self.inboxes[address].append(message)
                if isinstance(message, StepPlan):
                    self.steps.append(message)

    def deliver(self, name: str, at_once: bool = False) -> bool:
        """Give an actor its next message (or all of them). False when there is none."""
        inbox = self.inboxes[name]
        if not inbox or (name == "executor" and self.worker is None):
            return False
        if name == "scheduler":
            messages = inbox[:] if at_once else inbox[:1]
            del inbox[: len(messages)]
            self.tell(*messages)
        elif name == "executor":
            message = inbox.pop(0)
            if isinstance(message, CopyFromStaging | CopyToStaging):
                self._copy(message)
            else:
                self._run_step(message)
        elif name == "store":
            place = self.store.rng.randrange(len(inbox))
            self.inboxes["remote_cache_loader"].append(self.store.answer(inbox.pop(place)))
        else:
            self._post(self.cores[name].handle(self.now_s, [inbox.pop(0)]))
        return True

    def _run_step(self, plan: Message) -> None:
        assert isinstance(plan, StepPlan)
        assert self.worker is not None
        if plan.pool_epoch != self.epoch:
            return
        if self.poison is not None and any(self.poison(row) for row in plan.rows):
            self.crash()
            self.start_worker()
            return
        self.inboxes["scheduler"].append(self.worker.run(plan, self.errors))

    def _copy(self, message: CopyFromStaging | CopyToStaging) -> None:
        assert self.worker is not None
        if message.pool_epoch != self.epoch:
            return
        for block in message.blocks:
            memory = self.worker.memory[block.pool]
            if isinstance(message, CopyToStaging):
                places = [(block.block_id, offset) for offset in range(BLOCK_SIZE)]
                self.store.slots[block.slot] = [memory[place] for place in places]
                continue
            if self.loader is not None:
                content = self.loader.slots.pop((message.copy_id, block.slot))
            else:
                content = self.store.slots[block.slot]
            for offset, kv in enumerate(content):
                memory[block.block_id, offset] = kv
        if self.real_loader is not None:
            copied = StagingCopied(pool_epoch=self.epoch, copy_id=message.copy_id)
            self.inboxes["remote_cache_loader"].append(copied)

    def write_back_ends(self) -> bool:
        """The store answers the oldest write-back. False when there is none."""
        said = self.loader.release_hold() if self.loader is not None else []
        self._post(said)
        return bool(said)

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        timer = self.scheduler.next_timer_s()
        if timer is not None and timer <= self.now_s:
            self.tell()
        if self.real_loader is not None:
            timer = self.real_loader.next_timer_s()
            if timer is not None and timer <= self.now_s:
                self._post(self.real_loader.handle(self.now_s, []))

    def _post(self, said: Iterable[tuple[str, Message]]) -> None:
        for address, message in said:
            self.inboxes[address].append(message)

    def step(self) -> bool:
        """One delivery: decisions before work, so that planning ahead happens. False when all is quiet."""
        return any(
            self.deliver(name)
            for name in (
                "block_allocator",
                "swa_cache_manager",
                "remote_cache_loader",
                "scheduler",
                "executor",
                "store",
            )
        )

    def _go_on_when_quiet(self) -> bool:
        """Nothing is left to deliver: what can still happen by itself, write-backs and the near timer."""
        timer_s = self.scheduler.next_timer_s()
        if self.real_loader is not None and self.real_loader.state.loads:
            timer_s = self.now_s
        if not self.write_back_ends() and (timer_s is None or timer_s > self.now_s + 1):
            return False
        self.advance(0.1)
        return True

    def run(self, max_events: int = 20_000) -> None:
        """Until nothing is left to deliver."""
        for _ in range(max_events):
            self.now_s += 0.001
            if not self.step() and not self._go_on_when_quiet():
                return
        raise AssertionError(f"no end after {max_events} events: {self.scheduler.status()}")

    def run_until(self, condition: Callable[[], bool], max_events: int = 20_000) -> None:
        for _ in range(max_events):
            if condition():
                return
            assert self.step(), "all is quiet before the condition holds"
        raise AssertionError(f"not reached after {max_events} events")

    # What producers hear

    def _listen(self, outputs: StepOutputs) -> None:
        for tokens in outputs.tokens:
            got = self.tokens.setdefault(tokens.request_id, [])
            assert tokens.request_id not in self.ended, "tokens after the end"
            assert tokens.first_index == len(got), "a gap or a double"
            assert tokens.token_ids
            got.extend(tokens.token_ids)
        for ended in outputs.ended:
            assert ended.request_id not in self.ended, "ended twice"
            self.ended[ended.request_id] = ended

    def expected_tokens(self, request_id: RequestId) -> list[int]:
        """All output a request has when nothing cuts it short."""
        message = self.added[request_id]
        room = self.scheduler.settings.max_model_len - len(message.prompt_token_ids)
        max_tokens = min(message.sampling.max_tokens or room, room)
        tokens = [scripted_token(request_id, index) for index in range(max_tokens)]
        end = self.ends.get(request_id)
        if end is not None and message.sampling.min_tokens <= end < max_tokens:
            tokens[end:] = [EOS]
        return tokens

    def check_finished(self, request_id: RequestId) -> None:
        """It ran to its natural end with exactly its tokens."""
        ended = self.ended[request_id]
        assert isinstance(ended.outcome, Finished), ended
        expected = self.expected_tokens(request_id)
        assert self.tokens[request_id] == expected
        assert ended.usage.num_output_tokens == len(expected)
        assert ended.outcome.reason == ("stop" if expected[-1] == EOS else "length")

    def _pools(self) -> list[Any]:
        manager = self.cores.get("swa_cache_manager")
        pool = self.cores["block_allocator"].fa.pool
        return [pool] if manager is None else [pool, manager.cache.pool]

    def check_quiet(self) -> None:
        """Every request has ended and the pools balance."""
        status = self.scheduler.status()
        assert set(self.ended) == set(self.added)
        assert not status.has_work
        assert status.num_running == status.num_waiting == status.num_steps_in_flight == 0
        assert not self.scheduler._state.requests
        if self.real_loader is not None:
            self.real_loader.check()
        for pool in self._pools():
            use = pool.use()
            if status.worker == "ready":
                assert use.num_referenced == use.num_deferred == use.num_held == 0, use
                assert use.num_free + use.num_cached == use.num_blocks
