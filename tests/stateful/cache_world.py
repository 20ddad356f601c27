"""A small engine around the two cache cores: a scheduler that does what it is told, and a device whose KV
is a fingerprint of everything before a token, so that reading a wrong block is always noticed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ksana.cache.block_allocator import BlockAllocator
from ksana.cache.cache_config import CacheConfig
from ksana.cache.invariants import check_together
from ksana.cache.swa_manager import SWACacheManager
from ksana.messages.base import Message
from ksana.messages.blocks import (
    AllocateRequestBlocks,
    BlocksGranted,
    BlocksPlanned,
    NewRequestBlocks,
    PlanBlocks,
    ReleaseRequest,
    ResetPools,
    TableEdits,
    UpdateRequestTokens,
)
from ksana.messages.swa import SwaBatch, SwaBatchDone
from ksana.messages.swa_remote import SwaAnswer, SwaCall

POISON = -1

Tables = dict[tuple[int, int], tuple[dict[int, int], dict[int, int]]]
"""By request and run: its FA and SWA block tables."""


def sequence(prompt: tuple[int, ...], num_output: int) -> tuple[int, ...]:
    """Prompt and output; what comes next depends on everything before, as in a model."""
    tokens = list(prompt)
    for _ in range(num_output):
        tokens.append(hash(tuple(tokens)) % 3)
    return tuple(tokens)


@dataclass
class Request:
    request_id: int
    salt: str
    truth: tuple[int, ...]
    prompt_len: int
    known: int
    phase: str = "waiting"
    run: int = 0
    """Counts its admissions: tables of an earlier run mean nothing."""
    scheduled: int = 0
    computed: int = 0
    reported: tuple[int, int] = (0, 0)
    """Tokens computed, and known, by the last report."""
    samples_in_flight: int = 0
    was_preempted: bool = False
    kv: list[int] = field(default_factory=list)
    """What the KV of each position must be."""

    def __post_init__(self) -> None:
        self.kv = [hash((self.salt, self.truth[: end + 1])) for end in range(len(self.truth))]


@dataclass
class Row:
    request: Request
    run: int
    grant: BlocksGranted

    @property
    def key(self) -> tuple[int, int]:
        return self.request.request_id, self.run


@dataclass
class Step:
    step_id: int
    rows: list[Row]
    edits: list[tuple[tuple[int, int], TableEdits]]
    copies: list[Callable[[], None]]
    """Copies from and to staging memory, sent before this step."""

    def edit_tables(self, tables: Tables) -> None:
        """As a worker does at the beginning of the step."""
        for key, edits in self.edits:
            if key in tables:
                fa_table, swa_table = tables[key]
                fa_table.update((edit.index, edit.block_id) for edit in edits.fa_edits)
                swa_table.update((edit.index, edit.block_id) for edit in edits.swa_edits)
        for row in self.rows:
            fa_table, swa_table = tables.setdefault(row.key, ({}, {}))
            fa_table.update((edit.index, edit.block_id) for edit in row.grant.fa_edits)
            swa_table.update((edit.index, edit.block_id) for edit in row.grant.swa_edits)


class World:
    """Steps are planned, sent and done one by one; every message is followed by a full check."""

    def __init__(self, config: CacheConfig, budget: int = 8) -> None:
        self.config = config
        self.budget = budget
        self.allocator = BlockAllocator(config)
        self.manager = SWACacheManager(config) if config.has_swa else None
        self.requests: dict[int, Request] = {}
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.in_flight: deque[Step] = deque()
        self.releases: list[int] = []
        self.edits: list[tuple[tuple[int, int], TableEdits]] = []
        self.copies: list[Callable[[], None]] = []
        self.open: PlanBlocks | None = None
        self.to_manager: list[Message] = []
        self.to_allocator: list[Message] = []
        self.last_answer: BlocksPlanned | None = None
        self.num_messages = 0
        self._next_id = 1
        self._last_step_id = 0
        self._epoch = 1
        self._empty_device()

    def _empty_device(self) -> None:
        size = self.config.block_size
        self.fa_kv = [[POISON] * size for _ in range(self.config.num_fa_blocks)]
        self.swa_kv = [[POISON] * size for _ in range(self.config.num_swa_blocks)]
        self.tables: Tables = {}

    # Messages

    def _tell_allocator(self, message: Message) -> None:
        self.num_messages += 1
        for address, said in self.allocator.handle(0.0, [message]):
            if address == "swa_cache_manager":
                self.to_manager.append(said)
            elif address == "remote_cache_loader":
                self.hear_remote(said)
            else:
                assert isinstance(said, BlocksPlanned)
                self._take_answer(said)
        self.check()

    def deliver_to_manager(self) -> None:
        """What the allocator has said reaches the SWA cache manager."""
        assert self.manager is not None
        for message in self.to_manager:
            assert isinstance(message, SwaBatch | ResetPools | SwaCall)
            self.num_messages += 1
            self.to_allocator.extend(said for _, said in self.manager.handle(0.0, [message]))
            self.manager.check_touched()
            self.manager.check()
        self.to_manager = []

    def deliver_to_allocator(self) -> None:
        messages, self.to_allocator = self.to_allocator, []
        for message in messages:
            assert isinstance(message, SwaBatchDone | SwaAnswer)
            self._tell_allocator(message)

    def settle(self) -> None:
        """Until nobody waits for an answer."""
        while self.to_manager or self.to_allocator:
            if self.to_manager:
                self.deliver_to_manager()
            self.deliver_to_allocator()

    def hear_remote(self, said: Message) -> None:
        """What the allocator tells the remote-cache loader."""
        raise AssertionError(f"there is no loader: {said}")

    def check(self) -> None:
        self.allocator.check_touched()
        if self.allocator.is_batch_open or self.to_manager or self.to_allocator:
            self.allocator.check()
        else:
            check_together(self.allocator, self.manager)

    # Requests

    def add(self, prompt: tuple[int, ...], num_output: int, salt: str) -> None:
        request = Request(self._next_id, salt, sequence(prompt, num_output), len(prompt), len(prompt))
        self._next_id += 1
        self.requests[request.request_id] = request
        self.waiting.append(request.request_id)

    def leave(self, request_id: int, *, for_good: bool) -> None:
        """Release a running request at once, whatever steps are in flight."""
        request = self.requests[request_id]
        self.running.remove(request_id)
        self.releases.append(request_id)
        if for_good:
            del self.requests[request_id]
            request.phase = "ended"
            return
        request.phase = "waiting"
        request.was_preempted = True
        request.scheduled = request.computed = request.samples_in_flight = 0
        self.waiting.append(request_id)
        self.waiting.sort()

    # Planning

    def plan(self, *, budget: int | None = None, num_new: int = 3, report_all: bool = True) -> None:
        assert self.open is None
        budget = self.budget if budget is None else budget
        updates = []
        for request_id in self.running:
            request = self.requests[request_id]
            if self._is_report_due(request, report_all):
                tokens = request.truth[request.reported[1] : request.known]
                updates.append(
                    UpdateRequestTokens(
                        request_id=request_id, token_ids=tokens, num_computed_tokens=request.computed
                    )
                )
                request.reported = (request.computed, request.known)
        demands = [demand for request_id in self.running if (demand := self._demand(request_id))]
        demands += [self._new_demand(self.requests[request_id]) for request_id in self.waiting[:num_new]]
        self._last_step_id += 1
        oldest = self.in_flight[0].step_id if self.in_flight else self._last_step_id
        self.open = PlanBlocks(
            pool_epoch=self._epoch,
            step_id=self._last_step_id,
            done_step_id=oldest - 1,
            token_budget=budget,
            updates=tuple(updates),
            releases=tuple(ReleaseRequest(request_id=request_id) for request_id in self.releases),
            demands=tuple(demands),
        )
        self.releases = []
        self._tell_allocator(self.open)

    def _new_demand(self, request: Request) -> AllocateRequestBlocks:
        new = NewRequestBlocks(
            token_ids=request.truth[: request.known],
            cache_salt=request.salt,
            num_reserved_tokens=request.known + 1,
            resumed=request.was_preempted,
        )
        return AllocateRequestBlocks(
            request_id=request.request_id, num_computed_tokens=0, num_tokens=request.known, new=new
        )

    def _is_report_due(self, request: Request, report_all: bool) -> bool:
        size = self.config.block_size
        if request.computed // size > request.reported[0] // size:
            return True
        return report_all and request.computed > request.reported[0]

    def _demand(self, request_id: int) -> AllocateRequestBlocks | None:
        request = self.requests[request_id]
        left = request.known + request.samples_in_flight - request.scheduled
        if left < 1 or request.scheduled >= len(request.truth) - 1:
            return None
        return AllocateRequestBlocks(
            request_id=request_id, num_computed_tokens=request.scheduled, num_tokens=left
        )

    def _take_answer(self, answer: BlocksPlanned) -> None:
        plan, self.open = self.open, None
        assert plan is not None
        assert answer.step_id == plan.step_id
        answered = [*answer.grants, *answer.refusals]
        assert sorted(a.request_id for a in answered) == sorted(d.request_id for d in plan.demands)
        self.last_answer = answer
        self._check_order(plan, answer)
        self._poison_free_blocks()
        for edits in answer.edits:
            request = self.requests.get(edits.request_id)
            run = request.run if request is not None else 0
            self.edits.append(((edits.request_id, run), edits))
        rows = [row for grant in answer.grants if (row := self._row(grant)) is not None]
        self._check_writers(rows)
        if rows:
            self.in_flight.append(Step(answer.step_id, rows, self.edits, self.copies))
            self.edits = []
            self.copies = []

    def _check_order(self, plan: PlanBlocks, answer: BlocksPlanned) -> None:
        """Budget kept; no new request overtakes a refused one."""
        assert sum(grant.num_tokens for grant in answer.grants) <= plan.token_budget
        refused = {refusal.request_id for refusal in answer.refusals}
        is_refused = False
        for demand in plan.demands:
            if demand.request_id in refused:
                is_refused = True
            elif demand.new is not None:
                assert not is_refused

    def _row(self, grant: BlocksGranted) -> Row | None:
        request = self.requests.get(grant.request_id)
        assert request is not None
        if request.phase == "waiting":
            assert request.request_id in self.waiting
            self.waiting.remove(request.request_id)
            self.running.append(request.request_id)
            self.running.sort()
            request.phase = "running"
            request.run += 1
            request.scheduled = request.computed = grant.start
            request.reported = (grant.start, request.known)
            assert grant.start < request.known
        assert grant.start == request.scheduled
        assert grant.num_tokens >= 1
        request.scheduled += grant.num_tokens
        assert request.scheduled <= request.known + request.samples_in_flight
        if request.scheduled == request.known + request.samples_in_flight:
            request.samples_in_flight += 1
        return Row(request, request.run, grant)

    def _check_writers(self, rows: list[Row]) -> None:
        """No block that the new step writes is one that a step in flight reads or writes for another."""
        named: dict[tuple[str, int], int] = {}
        tables = {key: (dict(fa), dict(swa)) for key, (fa, swa) in self.tables.items()}
        for step in self.in_flight:
            step.edit_tables(tables)
            for row in step.rows:
                fa_table, swa_table = tables[row.key]
                first = max(0, row.grant.start - (self.config.sliding_window or 0)) // self.config.block_size
                for block_id in fa_table.values():
                    named["fa", block_id] = row.request.request_id
                for index, block_id in swa_table.items():
                    if index >= first:
                        named["swa", block_id] = row.request.request_id
        for row in rows:
            written_from = row.grant.fa_write_start // self.config.block_size
            for kind, edits in (("fa", row.grant.fa_edits), ("swa", row.grant.swa_edits)):
                for edit in edits:
                    if edit.index >= (
                        written_from if kind == "fa" else row.grant.start // self.config.block_size
                    ):
                        other = named.get((kind, edit.block_id))
                        assert other in (None, row.request.request_id), (kind, edit, other)

    def _poison_free_blocks(self) -> None:
        for block_id in self.allocator.fa.pool.snapshot()["free"]:
            self.fa_kv[block_id] = [POISON] * self.config.block_size
        if self.manager is not None:
            for block_id in self.manager.cache.pool.snapshot()["free"]:
                self.swa_kv[block_id] = [POISON] * self.config.block_size

    # The device

    def step_done(self) -> None:
        """The oldest step in flight runs now, and is done."""
        step = self.in_flight.popleft()
        for copy in step.copies:
            copy()
        step.edit_tables(self.tables)
        for row in step.rows:
            self._write(row)
        for row in step.rows:
            self._read(row)
            self._take_result(row)
        self.run_copies()

    def run_copies(self) -> None:
        """Copies take their turn among the steps: at once only if none is in flight."""
        while self.copies and not self.in_flight:
            self.copies.pop(0)()

    def _write(self, row: Row) -> None:
        size = self.config.block_size
        fa_table, swa_table = self.tables[row.key]
        for position in range(row.grant.start, row.grant.start + row.grant.num_tokens):
            if position >= row.grant.fa_write_start:
                block_id = fa_table[position // size]
                assert block_id not in self.allocator.fa.tree, "writing into a shared block"
                self.fa_kv[block_id][position % size] = row.request.kv[position]
            if self.manager is not None:
                self.swa_kv[swa_table[position // size]][position % size] = row.request.kv[position]

    def _read(self, row: Row) -> None:
        size = self.config.block_size
        kv = row.request.kv
        fa_table, swa_table = self.tables[row.key]
        end = row.grant.start + row.grant.num_tokens
        for position in range(end):
            assert self.fa_kv[fa_table[position // size]][position % size] == kv[position], (row, position)
        if self.manager is not None:
            first = max(0, row.grant.start - (self.config.sliding_window or 0) + 1)
            for position in range(first, end):
                block_id = swa_table[position // size]
                assert block_id >= 0, (row, position)
                assert self.swa_kv[block_id][position % size] == kv[position], (row, position)

    def _take_result(self, row: Row) -> None:
        request = row.request
        if request.phase != "running" or request.run != row.run:
            return
        request.computed = row.grant.start + row.grant.num_tokens
        if request.computed == request.known:
            request.known += 1
            request.samples_in_flight -= 1
            if request.known == len(request.truth):
                self.leave(request.request_id, for_good=True)

    # Larger moves

    def reset(self) -> None:
        """The worker was lost: all that is in flight or open is void, everybody starts again."""
        self._epoch += 1
        self.open = None
        self.in_flight.clear()
        self.edits = []
        self.copies = []
        self.releases = []
        for request_id in list(self.running):
            self.leave(request_id, for_good=False)
        self.releases = []
        self._empty_device()
        self._tell_allocator(ResetPools(pool_epoch=self._epoch))

    def run_to_the_end(self, max_steps: int = 2000) -> None:
        """Like a scheduler: plan ahead by one, preempt the youngest when a running one finds no room."""
        for _ in range(max_steps):
            self.settle()
            if len(self.in_flight) > (1 if self.config.plan_ahead else 0):
                self.step_done()
            if not self.requests and not self.in_flight and not self.releases:
                break
            self.plan()
            self.settle()
            answer = self.last_answer
            assert answer is not None
            needs_room = any(r.request_id in self.running for r in answer.refusals if r.reason == "no_room")
            if needs_room and not answer.fa_use.num_deferred:
                if not self.make_way() and len(self.running) > 1:
                    self.leave(self.running[-1], for_good=False)
            elif not answer.grants and not self.running:
                self.make_way()
            if not answer.grants and self.in_flight:
                self.step_done()
        assert not self.requests, "requests that never end"
        self.plan(num_new=0)
        self.settle()

    def make_way(self) -> bool:
        """Take blocks from somebody who waits; whether there was one."""
        return False

    def check_empty(self) -> None:
        """Nobody runs: every block is free or cached."""
        assert self.last_answer is not None
        for use in (self.last_answer.fa_use, self.last_answer.swa_use):
            if use is not None:
                assert use.num_referenced == use.num_deferred == use.num_held == 0
                assert use.num_free + use.num_cached == use.num_blocks
