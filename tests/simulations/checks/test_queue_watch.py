"""What the queue watch says of single activations of a scheduler."""

from __future__ import annotations

import msgspec
import pytest

from ksana.cache.block_allocator import BlockAllocator
from ksana.cache.cache_config import CacheConfig
from ksana.messages.base import Message
from ksana.messages.blocks import PlanBlocks, ReleaseRequest
from ksana.messages.remote import LoadPrefix, PrefixLoaded
from ksana.messages.requests import AddRequest, SamplingParams
from ksana.messages.steps import NewRow, Row, StepPlan, WorkerLost
from ksana.runtime.actor import Said
from ksana.scheduling.scheduler import Scheduler
from ksana.scheduling.settings import SchedulerSettings
from ksana.wiring import Cores
from simulations.checks.promises import BrokenPromise
from simulations.checks.queue_watch import QueueWatch
from tests.cache.test_swa_manager import more, new
from tests.simulations.worlds import ENGINE

SPEC = msgspec.structs.replace(ENGINE, max_num_seqs=2)
CORES = Cores(
    scheduler=Scheduler(
        SchedulerSettings(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=256, block_size=4)
    ),
    allocator=BlockAllocator(CacheConfig(block_size=4, num_fa_blocks=200)),
    manager=None,
)
PROMPT = (1, 2, 3, 4, 5)
SAMPLING = SamplingParams(seed=0, max_tokens=8)
LOADED = PrefixLoaded(pool_epoch=0, request_id=2, outcome="nothing", holds_blocks=False)


class Watched:
    """Request 1 runs, and request 2 waits or loads."""

    def __init__(self) -> None:
        self.watch = QueueWatch(SPEC)
        self.hear(add(1), add(2))
        self.say(("executor", step(1)))

    def hear(self, *messages: Message) -> None:
        self._take(messages, ())

    def say(self, *said: Said, is_well: bool = True) -> None:
        self._take((), said, is_well=is_well)

    def _take(self, messages: tuple[Message, ...], said: tuple[Said, ...], *, is_well: bool = True) -> None:
        self.watch.take(0.0, messages, said, CORES, is_simple=False, is_well=is_well)


def add(request_id: int) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=PROMPT,
        sampling=SAMPLING,
        eos_token_ids=(),
        arrival_time_s=0.0,
        deadline_s=1e6,
    )


def step(request_id: int) -> StepPlan:
    row = Row(request_id=request_id, start=0, num_tokens=5, sample=True, fa_write_start=0)
    new_row = NewRow(request_id=request_id, prompt_len=5, token_ids=PROMPT, sampling=SAMPLING)
    return StepPlan(pool_epoch=0, step_id=request_id, rows=(row,), new=(new_row,))


def plan(*demands, releases: tuple[int, ...] = (), step_id: int = 5) -> Said:
    return "block_allocator", PlanBlocks(
        pool_epoch=0,
        step_id=step_id,
        done_step_id=0,
        token_budget=64,
        updates=(),
        releases=tuple(ReleaseRequest(request_id=request_id) for request_id in releases),
        demands=demands,
    )


def load(request_id: int, token_ids: tuple[int, ...] = PROMPT) -> Said:
    return "remote_cache_loader", LoadPrefix(
        pool_epoch=0,
        request_id=request_id,
        token_ids=token_ids,
        cache_salt="",
        num_reserved_tokens=9,
        give_up_at_s=1.0,
        prefill_tokens_per_s=0.0,
    )


def test_who_is_back_from_its_load_is_asked_for_in_the_next_plan() -> None:
    for is_asked in (True, False):
        watched = Watched()
        watched.say(load(2), plan(more(1, 5)))
        watched.say(plan(more(1, 6)))
        watched.hear(LOADED)
        if is_asked:
            watched.say(plan(more(1, 7), new(2, PROMPT)))
            watched.say(plan(more(1, 8)))
            continue
        with pytest.raises(BrokenPromise, match=r"none of \[2\] is asked for"):
            watched.say(plan(more(1, 7)))


def test_when_blocks_are_given_back_who_waits_is_asked_for() -> None:
    watched = Watched()
    watched.say(plan(more(1, 5)))
    with pytest.raises(BrokenPromise, match=r"none of \[2\] is asked for"):
        watched.say(plan(more(1, 6), releases=(7,)))


def test_nobody_need_be_asked_for_without_a_place() -> None:
    watched = Watched()
    watched.say(plan(more(1, 7, 64), releases=(8,)))  # no tokens left
    watched.hear(add(3))
    watched.say(("executor", step(3)))
    watched.say(plan(more(1, 71), more(3, 6), releases=(7,)))  # two may run


def test_after_a_loss_suspects_are_tried_alone() -> None:
    watched = Watched()
    watched.say(plan(more(1, 6), releases=(7,)), is_well=False)


def test_a_load_of_who_has_its_blocks_still_is_noticed() -> None:
    watched = Watched()
    with pytest.raises(BrokenPromise, match="request 1 loads, and has its blocks still"):
        watched.say(load(1))


def test_a_load_of_nothing_is_noticed() -> None:
    watched = Watched()
    with pytest.raises(BrokenPromise, match="request 2 loads, and has no full block to load"):
        watched.say(load(2, PROMPT[:4]))


def test_what_ran_before_a_loss_may_load() -> None:
    watched = Watched()
    watched.hear(WorkerLost(pool_epoch=0, reason="test", restarting=True))
    watched.say(load(1))

    watched = Watched()
    watched.say(plan(new(2, PROMPT), releases=(1,)))
    watched.say(load(1))
