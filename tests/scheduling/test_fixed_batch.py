"""The fixed-batch policy with the real scheduler and allocators, and a worker that checks what it reads."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import pytest

from ksana.cache.block_allocator import BlockAllocator
from ksana.cache.cache_config import CacheConfig
from ksana.cache.swa_manager import SWACacheManager
from ksana.devices.simulated_worker import SimulatedWorker, TokenSource, hashed_tokens
from ksana.errors import InvariantViolated
from ksana.messages.base import Message
from ksana.messages.blocks import PlanBlocks
from ksana.messages.outputs import Aborted, Failed, RequestEnded, StepOutputs
from ksana.messages.perf import AddInferRequest, InferBatchReady, InferRequest, RunInferRound
from ksana.messages.requests import Abort, SamplingParams
from ksana.messages.steps import StepPlan, WorkerLost, WorkerReady
from ksana.scheduling.fixed_batch import FixedBatchPolicy
from ksana.scheduling.scheduler import Scheduler
from ksana.scheduling.settings import SchedulerSettings

BLOCK_SIZE = 8


class World:
    """Queues between the cores; `run` delivers until all is quiet."""

    def __init__(
        self,
        *,
        num_fa_blocks: int = 64,
        num_swa_blocks: int = 40,
        window: int | None = None,
        plan_ahead: bool = False,
        budget: int = 32,
        tokens: TokenSource | None = None,
    ) -> None:
        swa_blocks = num_swa_blocks if window is not None else 0
        self.config = CacheConfig(
            block_size=BLOCK_SIZE,
            num_fa_blocks=num_fa_blocks,
            num_swa_blocks=swa_blocks,
            sliding_window=window,
            plan_ahead=plan_ahead,
        )
        settings = SchedulerSettings(
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            max_model_len=256,
            block_size=BLOCK_SIZE,
            sliding_window=window,
            plan_ahead=plan_ahead,
        )
        self.scheduler = Scheduler(settings, FixedBatchPolicy())
        self.allocator = BlockAllocator(self.config)
        self.manager = SWACacheManager(self.config) if window is not None else None
        self.tokens = tokens or hashed_tokens(1000)
        self.epoch = 0
        self.inboxes: dict[str, deque[Message]] = {
            name: deque() for name in ("scheduler", "block_allocator", "swa_cache_manager", "executor")
        }
        self.plans: list[StepPlan] = []
        self.asked: list[PlanBlocks] = []
        self.ready: list[InferBatchReady] = []
        self.outputs: list[StepOutputs] = []
        self.start_worker()

    def start_worker(self) -> None:
        self.epoch += 1
        self.worker: SimulatedWorker | None = SimulatedWorker(
            self.tokens,
            block_size=BLOCK_SIZE,
            num_fa_blocks=self.config.num_fa_blocks,
            num_swa_blocks=self.config.num_swa_blocks,
            sliding_window=self.config.sliding_window,
        )
        self.tell(WorkerReady(pool_epoch=self.epoch))

    def lose_worker(self, restarting: bool = True) -> None:
        self.worker = None
        self.inboxes["executor"].clear()
        self.tell(WorkerLost(pool_epoch=self.epoch, reason="killed by signal 9", restarting=restarting))

    def tell(self, *messages: Message) -> None:
        self._post(self.scheduler.handle(0.0, messages))

    def add(self, *requests: tuple[int, int, int]) -> None:
        """Requests of (id, S, F)."""
        self.tell(
            AddInferRequest(
                requests=tuple(
                    InferRequest(
                        request_id=request_id,
                        token_ids=tuple((request_id * 31 + i * 7) % 1000 for i in range(num_tokens)),
                        forwarding_token_num=forwarding,
                        sampling=SamplingParams(seed=request_id),
                        cache_salt=str(request_id),
                    )
                    for request_id, num_tokens, forwarding in requests
                ),
                fill_seed=3,
            )
        )

    def abort(self, *request_ids: int) -> None:
        self.tell(*(Abort(request_id=request_id) for request_id in request_ids))
        self.run()

    def run(self) -> None:
        while any(self._deliver(name) for name in self.inboxes):
            self.allocator.check()
            if self.manager is not None:
                self.manager.check()

    def _deliver(self, name: str) -> bool:
        inbox = self.inboxes[name]
        if not inbox or (name == "executor" and self.worker is None):
            return False
        message = inbox.popleft()
        if name == "scheduler":
            self.tell(message)
        elif name == "executor":
            assert isinstance(message, StepPlan)
            assert self.worker is not None
            self.inboxes["scheduler"].append(self.worker.run(message))
        else:
            core: Any = self.allocator if name == "block_allocator" else self.manager
            self._post(core.handle(0.0, [message]))
        return True

    def _post(self, said: Any) -> None:
        for address, message in said:
            if isinstance(message, StepOutputs):
                self.outputs.append(message)
            elif isinstance(message, InferBatchReady):
                self.ready.append(message)
            else:
                self.inboxes[address].append(message)
            if isinstance(message, StepPlan):
                self.plans.append(message)
            elif isinstance(message, PlanBlocks):
                self.asked.append(message)

    def endings(self) -> dict[int, RequestEnded]:
        return {ended.request_id: ended for outputs in self.outputs for ended in outputs.ended}

    def is_empty(self) -> bool:
        pools = [self.allocator.fa.pool] + ([self.manager.cache.pool] if self.manager else [])
        uses = [pool.use() for pool in pools]
        return all(use.num_free + use.num_cached == use.num_blocks for use in uses) and not (
            self.scheduler.status().has_work or self.scheduler.status().num_steps_in_flight
        )


def without_number(plan: StepPlan) -> StepPlan:
    return msgspec.structs.replace(plan, step_id=0)


@pytest.mark.parametrize("window", [None, 12, 40])
@pytest.mark.parametrize("plan_ahead", [False, True])
def test_every_round_is_the_same_step(window: int | None, plan_ahead: bool) -> None:
    world = World(window=window, plan_ahead=plan_ahead)
    world.add((1, 70, 1), (2, 96, 16), (3, 9, 9), (4, 41, 1))
    world.run()
    assert len(world.ready) == 1
    assert not world.outputs
    num_walked = len(world.plans)
    for _ in range(5):
        world.tell(RunInferRound())
        if not plan_ahead:
            world.run()
    world.run()
    rounds = world.plans[num_walked:]
    assert len(rounds) == 5
    assert len({msgspec.msgpack.encode(without_number(plan)) for plan in rounds}) == 1
    shape = [(row.request_id, row.start, row.num_tokens, row.sample) for row in rounds[0].rows]
    assert shape == [(1, 69, 1, True), (2, 80, 16, True), (3, 0, 9, True), (4, 40, 1, True)]
    assert all(not (row.fa_edits or row.swa_edits) for row in rounds[0].rows)
    assert not rounds[0].new
    assert not rounds[0].edits
    # The same step gives the same tokens, each of them the first of its request.
    assert len(world.outputs) == 5
    assert all(outputs.tokens == world.outputs[0].tokens for outputs in world.outputs)
    assert [tokens.first_index for tokens in world.outputs[0].tokens] == [0, 0, 0, 0]
    world.abort(1, 2, 3, 4)
    assert all(isinstance(ended.outcome, Aborted) for ended in world.endings().values())
    assert set(world.endings()) == {1, 2, 3, 4}
    assert world.is_empty()


def test_the_walk_goes_through_the_prefix_in_chunks_and_computes_nothing() -> None:
    world = World(window=12)
    world.add((1, 101, 1), (2, 33, 1))
    world.run()
    walked = world.plans
    assert all(plan.rehearsal is not None and plan.rehearsal.fill_seed == 3 for plan in walked)
    assert not any(row.sample for plan in walked for row in plan.rows)
    rows = [[(row.request_id, row.start, row.num_tokens) for row in plan.rows] for plan in walked]
    assert rows == [
        [(1, 0, 32)],
        [(1, 32, 32)],
        [(1, 64, 32)],
        [(1, 96, 4), (2, 0, 28)],
        [(2, 28, 4)],
        [(1, 100, 1), (2, 32, 1)],
    ]
    # The window has moved on: of 101 tokens only the blocks from 88 on are left, of 33 those from 16 on.
    assert world.ready[0].swa_use is not None
    assert world.ready[0].swa_use.num_referenced == 2 + 3
    assert world.ready[0].fa_use.num_referenced == 13 + 5


def test_a_round_says_how_it_is_to_be_run() -> None:
    world = World()
    world.add((1, 20, 4))
    world.run()
    world.tell(RunInferRound(num_layer_rounds=3, trace_operators=True))
    world.run()
    last = world.plans[-1].rehearsal
    assert last is not None
    assert (last.fill_seed, last.num_layer_rounds, last.trace_operators) == (None, 3, True)


def test_batches_follow_each_other_also_when_the_pool_is_full() -> None:
    world = World(num_fa_blocks=16, window=12)
    for batch in range(6):
        first = 10 * batch + 1
        world.add((first, 60, 1), (first + 1, 60, 30))
        world.run()
        world.tell(RunInferRound(), RunInferRound())
        world.run()
        assert len(world.ready) == batch + 1
        world.abort(first, first + 1)
        assert world.is_empty()
    assert not any(isinstance(ended.outcome, Failed) for ended in world.endings().values())


def test_orders_that_wait_for_the_walk_are_carried_out_after_it() -> None:
    world = World()
    world.add((1, 60, 1))
    world.tell(RunInferRound(), RunInferRound())
    world.run()
    assert len(world.outputs) == 2


def test_a_round_on_its_way_when_the_batch_ends_is_dropped() -> None:
    world = World()
    world.add((1, 60, 1))
    world.run()
    world.abort(1)
    world.tell(RunInferRound())
    world.run()
    assert world.is_empty()
    world.add((2, 20, 1))
    world.run()
    assert len(world.ready) == 2
    assert len(world.outputs) == 1  # the ending of the first


@pytest.mark.parametrize("window", [None, 12])
def test_what_does_not_fit_fails_as_a_whole(window: int | None) -> None:
    world = World(num_fa_blocks=16, window=window)
    world.add((1, 70, 1), (2, 70, 1))
    world.run()
    outcomes = [ended.outcome for ended in world.endings().values()]
    assert len(outcomes) == 2
    assert all(isinstance(outcome, Failed) for outcome in outcomes)
    assert not world.ready
    assert world.is_empty()
    world.add((3, 70, 1))
    world.run()
    assert len(world.ready) == 1


def test_a_row_in_error_fails_the_batch() -> None:
    world = World(tokens=lambda request, _position: "NaN" if request.request_id == 2 else 5)
    world.add((1, 20, 1), (2, 20, 1), (3, 20, 1))
    world.run()
    world.tell(RunInferRound())
    world.run()
    endings = world.endings()
    assert set(endings) == {1, 2, 3}
    assert isinstance(endings[2].outcome, Failed)
    assert "NaN" in endings[2].outcome.message
    assert isinstance(endings[1].outcome, Failed)
    assert "another request" in endings[1].outcome.message
    assert world.is_empty()


@pytest.mark.parametrize("after", ["walk", "round"])
def test_a_lost_worker_fails_the_batch_and_the_next_one_runs(after: str) -> None:
    world = World(window=12)
    world.add((1, 60, 1), (2, 60, 8))
    if after == "round":
        world.run()
        world.tell(RunInferRound())
    world.lose_worker()
    world.run()
    assert set(world.endings()) == {1, 2}
    for ended in world.endings().values():
        assert isinstance(ended.outcome, Failed)
        assert "killed by signal 9" in ended.outcome.message
    world.start_worker()
    world.add((3, 60, 1), (4, 60, 8))
    world.run()
    world.tell(RunInferRound())
    world.run()
    assert world.plans[-1].pool_epoch == 2
    world.abort(3, 4)
    assert world.is_empty()


def test_a_worker_that_does_not_come_back_fails_every_batch() -> None:
    world = World()
    world.lose_worker(restarting=False)
    world.add((1, 20, 1))
    world.run()
    outcome = world.endings()[1].outcome
    assert isinstance(outcome, Failed)
    assert outcome.code == "worker_lost"


def test_two_batches_at_once_are_a_bug() -> None:
    world = World()
    world.add((1, 20, 1))
    with pytest.raises(InvariantViolated, match="while the one before it"):
        world.add((2, 20, 1))
