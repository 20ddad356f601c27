"""Remote loading with sliding layers: the worked examples of the specification, in both window modes."""

from __future__ import annotations

from typing import Any

import pytest

from ksana.cache.invariants import check_together
from ksana.messages.base import Message
from ksana.messages.blocks import BlocksPlanned, PlanBlocks, ResetPools
from ksana.messages.remote import (
    AllocateBlocksForRemoteCache,
    BlocksFilled,
    BlocksHeld,
    ConfirmRemoteCacheLoadingResult,
    DropRemoteCacheLoading,
    GetRequestPrefixBlockNumberBeforeRemoteCacheLoading,
    HoldBlocks,
    ReleaseHeldBlocks,
    RemoteBlocksAllocated,
    RemoteCallRefused,
)
from ksana.messages.swa import FaBlock
from tests.cache.test_swa_manager import Pair, done, more, new

PROMPT = tuple(range(1000, 1200))
"""Twelve full blocks of 16 tokens, and 8 tokens."""

both_modes = pytest.mark.parametrize("window_open_at_start", [False, True])


class Loads(Pair):
    """Pair, and a loader's calls."""

    def deliver(self, said: list[tuple[str, Message]]) -> list[Message]:
        """Until nothing is left to say between the two; what the others are told."""
        told = []
        while said:
            address, message = said.pop(0)
            if address == "swa_cache_manager":
                for _, answer in self.manager.handle(0.0, [message]):
                    self.manager.check()
                    said.extend(self.allocator.handle(0.0, [answer]))
            else:
                told.append(message)
        check_together(self.allocator, self.manager)
        return told

    def call(self, message: Message) -> Any:
        told = self.deliver(list(self.allocator.handle(0.0, [message])))
        assert len(told) < 2
        return told[0] if told else None

    def probe(self, request_id: int = 9, tokens: tuple[int, ...] = PROMPT, reserved: int = 0) -> Any:
        return self.call(
            GetRequestPrefixBlockNumberBeforeRemoteCacheLoading(
                pool_epoch=1,
                request_id=request_id,
                token_ids=tokens,
                cache_salt="",
                num_reserved_tokens=reserved,
            )
        )

    def allocate(self, num_fa: int, num_swa: int, request_id: int = 9) -> Any:
        return self.call(
            AllocateBlocksForRemoteCache(
                pool_epoch=1, request_id=request_id, fa_block_num=num_fa, swa_block_num=num_swa
            )
        )

    def confirm(self, matched: int, slots: tuple[int, ...], reserved: int, request_id: int = 9) -> Any:
        return self.call(confirmation(matched, slots, reserved, request_id))

    def drop(self, request_id: int = 9) -> None:
        assert self.call(DropRemoteCacheLoading(pool_epoch=1, request_id=request_id)) is None

    def states(self) -> Any:
        return self.allocator.snapshot()["fa"], self.manager.snapshot()

    def num_held(self) -> tuple[int, int]:
        return self.allocator.fa.pool.use().num_held, self.manager.cache.pool.use().num_held

    def thin(self, tokens: tuple[int, ...], *indices: int) -> None:
        """As if these SWA blocks had been evicted."""
        path = self.allocator.fa.tree.match("", b"".join(t.to_bytes(4, "little") for t in tokens), 99)
        for index in indices:
            block = FaBlock(
                fa_block_id=path[index], generation=self.allocator.fa.pool.generation(path[index])
            )
            self.manager.cache.forget(block)

    def compute(self, request_id: int, tokens: tuple[int, ...]) -> None:
        """Compute the tokens and leave everything as cache."""
        self.prefill(request_id, tokens, len(tokens))
        self.plan(releases=(request_id,))


def confirmation(
    matched: int, slots: tuple[int, ...], reserved: int, request_id: int = 9
) -> ConfirmRemoteCacheLoadingResult:
    return ConfirmRemoteCacheLoadingResult(
        pool_epoch=1,
        request_id=request_id,
        matched_block_index=matched,
        matched_remote_swa_block_indexs=slots,
        reserved_block_num=reserved,
    )


def five_blocks(window_open_at_start: bool, **rest: Any) -> Loads:
    """Local FA hit 5, SWA valid bits 0 0 1 1 1."""
    loads = Loads(window_open_at_start=window_open_at_start, num_swa=40, **rest)
    loads.compute(1, PROMPT[:80])
    loads.thin(PROMPT[:80], 0, 1)
    assert loads.valid(PROMPT[:80]) == "00111"
    return loads


def allocated(loads: Loads) -> RemoteBlocksAllocated:
    probed = loads.probe()
    assert (probed.fa_block_num, probed.swa_block_num) == (5, 0)
    assert probed.swa_valid == (False, False, True, True, True)
    answer = loads.allocate(7, 4)
    assert (len(answer.fa_block_ids), len(answer.swa_block_ids)) == (7, 4)
    return answer


@both_modes
def test_worked_example(window_open_at_start: bool) -> None:
    loads = five_blocks(window_open_at_start)
    reserved = allocated(loads)
    fa_held, swa_held = loads.num_held()
    assert (fa_held, swa_held) == (12, 4 + 3)
    confirmed = loads.confirm(11, (7, 8, 9, 10), 1)
    assert (confirmed.cached_blocks, confirmed.num_remote_blocks) == (11, 11)
    assert loads.num_held() == (0, 0)
    assert loads.valid(PROMPT) == "00111001111"
    request = loads.allocator.fa.requests[9]
    assert request.fa_block_ids[5:] == list(reserved.fa_block_ids), "position 11 is kept, unfilled"
    assert request.num_cached_blocks == 11
    [grant] = loads.plan(new(9, PROMPT)).grants
    assert (grant.start, grant.num_tokens, grant.fa_write_start) == (176, 24, 176)
    assert [edit.index for edit in grant.swa_edits] == [7, 8, 9, 10, 11, 12]
    assert [edit.block_id for edit in grant.swa_edits[:4]] == list(reserved.swa_block_ids)
    assert [edit.block_id for edit in grant.fa_edits[5:12]] == list(reserved.fa_block_ids)
    assert loads.hits(PROMPT) == [-1, -1, 0, 0, 0, -1, -1, 1, 1, 1, 1]


@both_modes
def test_worked_example_in_which_one_swa_block_fails(window_open_at_start: bool) -> None:
    loads = five_blocks(window_open_at_start)
    reserved = allocated(loads)
    confirmed = loads.confirm(11, (7, 8, -1, 10), 1)
    assert (confirmed.cached_blocks, confirmed.num_remote_blocks) == (0, 0)
    assert loads.valid(PROMPT) == "00111001101"
    [grant] = loads.plan(new(9, PROMPT)).grants
    assert (grant.start, grant.num_tokens, grant.fa_write_start) == (0, 200, 176)
    assert [edit.index for edit in grant.swa_edits] == list(range(13))
    assert not {edit.block_id for edit in grant.swa_edits} & set(reserved.swa_block_ids) - {
        reserved.swa_block_ids[2]
    }, "blocks 7, 8 and 10 are cache; only the failed one may be given out again"
    loads.plan(updates=(done(9, 200),))
    assert loads.valid(PROMPT) == "111111111111"


@both_modes
def test_worked_example_with_sliding_layers_only(window_open_at_start: bool) -> None:
    loads = Loads(window_open_at_start=window_open_at_start, num_swa=40)
    loads.compute(1, PROMPT[:176])
    loads.thin(PROMPT[:176], *range(11))
    probed = loads.probe()
    assert (probed.fa_block_num, probed.swa_block_num, any(probed.swa_valid)) == (11, 0, False)
    assert loads.allocate(0, 4).fa_block_ids == ()
    confirmed = loads.confirm(11, (7, 8, 9, 10), 0)
    assert (confirmed.cached_blocks, confirmed.num_remote_blocks) == (11, 11)
    assert loads.plan(new(9, PROMPT)).grants[0].start == 176


@both_modes
def test_worked_example_with_nothing_remote(window_open_at_start: bool) -> None:
    loads = five_blocks(window_open_at_start)
    assert loads.probe().fa_block_num == 5
    confirmed = loads.confirm(5, (), 0)
    assert (confirmed.cached_blocks, confirmed.num_remote_blocks) == (0, 0)
    assert not loads.allocator.fa.loads
    [grant] = loads.plan(new(9, PROMPT)).grants
    assert (grant.start, grant.fa_write_start) == (0, 80)


@pytest.mark.parametrize(("window_open_at_start", "endpoint"), [(False, 0), (True, 3)])
def test_a_short_prefix_is_complete_in_the_open_mode(window_open_at_start: bool, endpoint: int) -> None:
    """Three blocks are less than a window of four."""
    loads = Loads(window_open_at_start=window_open_at_start, num_swa=40)
    loads.probe(tokens=PROMPT[:60])
    loads.allocate(3, 3)
    assert loads.confirm(3, (0, 1, 2), 0).cached_blocks == endpoint
    assert loads.plan(new(9, PROMPT[:60])).grants[0].start == 16 * endpoint


def test_what_the_local_cache_has_of_the_last_window_need_not_be_loaded() -> None:
    """Valid 0 0 1 1 1, one more block of each kind: the endpoint is 6, and its window 2 to 5."""
    loads = five_blocks(False)
    loads.probe()
    loads.allocate(1, 1)
    assert loads.num_held()[1] == 3 + 1, "blocks 2 to 4 are pinned, though no endpoint needs them yet"
    assert loads.confirm(6, (5,), 0).cached_blocks == 6


def test_an_swa_block_for_a_position_already_valid_is_freed() -> None:
    loads = five_blocks(False)
    allocated(loads)
    free = loads.manager.cache.pool.num_free
    assert loads.confirm(5, (1, 2, 3, 4), 0).cached_blocks == 5
    assert loads.manager.cache.pool.num_free == free + 3
    assert loads.valid(PROMPT) == "01111"


def test_siblings_that_appeared_meanwhile_survive_with_their_swa_blocks() -> None:
    loads = five_blocks(True)
    reserved = allocated(loads)
    loads.compute(2, PROMPT[:144])  # up to block 8
    loads.thin(PROMPT, 8)
    confirmed = loads.confirm(11, (7, 8, 9, 10), 1)
    assert confirmed.cached_blocks == 11
    assert confirmed.num_remote_blocks == 3, "without the load the siblings would have given 8"
    request = loads.allocator.fa.requests[9]
    assert request.fa_block_ids[9:] == list(reserved.fa_block_ids[4:])
    [grant] = loads.plan(new(9, PROMPT)).grants
    places = {edit.index: edit.block_id for edit in grant.swa_edits}
    assert places[7] != reserved.swa_block_ids[0]
    assert places[8] == reserved.swa_block_ids[1]


def test_hits_are_counted_once_however_often_a_request_comes_back() -> None:
    loads = five_blocks(True)
    loads.plan(releases=())
    allocated(loads)
    loads.confirm(11, (7, 8, 9, 10), 1)
    loads.plan(releases=(9,))  # dropped before it ran
    assert loads.hits(PROMPT)[7:] == [0, 0, 0, 0]
    [grant] = loads.plan(new(9, PROMPT, 8)).grants
    assert grant.start == 176
    assert loads.hits(PROMPT)[7:] == [1, 1, 1, 1]


def test_hits_of_a_resumed_request_are_not_counted() -> None:
    loads = five_blocks(True)
    allocated(loads)
    loads.confirm(11, (7, 8, 9, 10), 1)
    loads.plan(new(9, PROMPT, resumed=True))
    assert loads.hits(PROMPT)[7:] == [0, 0, 0, 0]


@pytest.mark.parametrize("state", ["probed", "allocated", "confirmed"])
@pytest.mark.parametrize("by", ["drop", "release"])
def test_everything_comes_back_from_every_state(state: str, by: str) -> None:
    loads = five_blocks(True)
    loads.probe()
    if state != "probed":
        loads.allocate(7, 4)
    if state == "confirmed":
        loads.confirm(9, (5, 6, 7, 8), 1)
    if by == "drop":
        loads.drop()
    elif state == "confirmed":
        loads.plan(releases=(9,))
    else:
        return
    for pool in (loads.allocator.fa.pool, loads.manager.cache.pool):
        assert pool.num_free + pool.num_cached == pool.num_blocks
    assert loads.manager.tables.num_set_aside == loads.manager.loading.num_set_aside == 0
    assert loads.valid(PROMPT) == ("001111111" if state == "confirmed" else "00111")


def test_a_short_swa_pool_refuses_and_changes_nothing() -> None:
    """One window, a chunk and a block are set aside by the probe; more slots than that find no room."""
    loads = Loads(num_swa=9, num_fa=30)
    loads.plan(new(1, (1, 2, 3)))
    loads.plan(updates=(done(1, 3),))
    loads.compute(3, tuple(range(300, 320)))
    refused = loads.probe()
    assert isinstance(refused, RemoteCallRefused)
    assert (refused.reason, refused.detail) == ("no_room", "9 SWA blocks needed, room for 8")
    assert loads.allocator.fa.loads == {}
    loads.plan(releases=(1,))
    loads.probe(tokens=PROMPT[:60])
    before = loads.states()
    refused = loads.probe(8, PROMPT[:100])
    assert refused.reason == "no_room"
    assert loads.states() == before
    loads.allocate(3, 3)
    loads.confirm(3, (0, 1, 2), 0)
    assert loads.plan(new(9, PROMPT[:60])).grants


def test_running_requests_may_leave_a_load_without_swa_blocks() -> None:
    loads = Loads(num_swa=9, num_fa=30)
    loads.plan(new(1, (1, 2, 3)))
    loads.probe(tokens=PROMPT[:120])
    loads.plan(more(1, 3, 80))
    before = loads.states()
    refused = loads.allocate(7, 5)
    assert (refused.reason, refused.detail) == ("no_room", "5 SWA blocks needed, room for 3")
    assert loads.states() == before, "no FA block was reserved or evicted either"
    assert loads.allocate(7, 3).swa_block_ids


def test_fa_blocks_evicted_for_a_load_take_their_swa_blocks_with_them() -> None:
    loads = Loads(num_fa=14, num_swa=40)
    loads.compute(1, tuple(range(60)))
    loads.probe()
    loads.allocate(12, 2)
    assert loads.valid(tuple(range(60))) == "11"
    loads.drop()


def test_calls_wait_for_the_open_batch_and_the_batch_for_the_open_call() -> None:
    loads = five_blocks(True)
    said = loads.ask(new(1, tuple(range(50))))
    probe = GetRequestPrefixBlockNumberBeforeRemoteCacheLoading(
        pool_epoch=1, request_id=9, token_ids=PROMPT, cache_salt="", num_reserved_tokens=0
    )
    calls = [
        probe,
        AllocateBlocksForRemoteCache(pool_epoch=1, request_id=9, fa_block_num=7, swa_block_num=4),
        confirmation(11, (7, 8, 9, 10), 1),
        confirmation(11, (7, 8, 9, 10), 1),
        DropRemoteCacheLoading(pool_epoch=1, request_id=9),
        probe,
    ]
    assert loads.allocator.handle(0.0, calls) == []
    told = [type(message).__name__ for message in loads.deliver(said)]
    assert told == [
        "BlocksPlanned",
        "PrefixBlockNumber",
        "RemoteBlocksAllocated",
        "RemoteLoadingConfirmed",
        "RemoteCallRefused",
        "PrefixBlockNumber",
    ]
    said = list(loads.allocator.handle(0.0, [confirmation(9, (), 0)]))
    assert said, "the load is probed again, not allocated"
    said = list(loads.allocator.handle(0.0, [HoldBlocks(pool_epoch=1, hold_id=1, blocks=())]))
    loads.step_id += 1
    plan = PlanBlocks(
        pool_epoch=1, step_id=loads.step_id, done_step_id=loads.step_id - 1, token_budget=9, demands=()
    )
    assert loads.allocator.is_batch_open
    assert loads.allocator.handle(0.0, [plan]) == []
    assert [type(message) for message in loads.deliver(said)] == [BlocksHeld, BlocksPlanned]


def test_reset_answers_the_open_call_and_those_that_wait() -> None:
    loads = five_blocks(True)
    loads.probe()
    question = loads.allocator.handle(
        0.0, [AllocateBlocksForRemoteCache(pool_epoch=1, request_id=9, fa_block_num=7, swa_block_num=4)]
    )
    waiting = [
        confirmation(5, (), 0),
        HoldBlocks(pool_epoch=1, hold_id=1, blocks=()),
        ReleaseHeldBlocks(pool_epoch=1, hold_id=1),
        DropRemoteCacheLoading(pool_epoch=1, request_id=9),
    ]
    assert loads.allocator.handle(0.0, waiting) == []
    said = loads.allocator.handle(0.0, [ResetPools(pool_epoch=2)])
    told = loads.deliver([*question, *said])
    assert [type(message) for message in told] == [RemoteCallRefused, RemoteCallRefused, BlocksHeld]
    assert loads.manager.loading.loads == {}
    assert loads.manager.cache.pool.num_free == 40


# Writing back


def test_held_swa_blocks_stay_until_they_are_let_go() -> None:
    loads = Loads(num_swa=9, num_fa=60)
    loads.compute(1, PROMPT[:80])
    loads.thin(PROMPT[:80], 0)
    path = loads.allocator.fa.tree.match("", b"".join(t.to_bytes(4, "little") for t in PROMPT), 99)
    blocks = tuple(map(loads.allocator.fa.fa_block, path))
    answer = loads.call(HoldBlocks(pool_epoch=1, hold_id=1, blocks=blocks[:3]))
    ids = [held.swa_block_id for held in answer.held]
    assert ids[0] == -1
    assert min(ids[1:]) >= 0
    assert loads.num_held() == (3, 2)
    loads.compute(2, tuple(range(112)))
    assert loads.valid(PROMPT[:80]) == "01100"
    loads.call(ReleaseHeldBlocks(pool_epoch=1, hold_id=1))
    assert loads.num_held() == (0, 0)
    loads.compute(3, tuple(range(500, 620)))
    assert loads.valid(PROMPT[:80]) == "00000"


def test_offers_come_with_the_answer_of_the_batch() -> None:
    """So their SWA blocks are fixed when the loader asks for them."""
    loads = Loads(num_swa=20, write_back=True)
    loads.plan(new(1, PROMPT[:40]))
    told = loads.deliver(loads.ask(updates=(done(1, 40),)))
    assert isinstance(told[0], BlocksPlanned)
    answer = loads.call(HoldBlocks(pool_epoch=1, hold_id=1, blocks=tuple(b.block for b in told[1].blocks)))
    assert [held.swa_block_id >= 0 for held in answer.held] == [True, True]


def offered(loads: Loads, request_id: int, tokens: tuple[int, ...]) -> list[int]:
    """Compute the tokens; the indices of the blocks that are then offered to the store."""
    loads.plan(new(request_id, tokens))
    told = loads.deliver(loads.ask(updates=(done(request_id, len(tokens)),)))
    return [b.index for message in told if isinstance(message, BlocksFilled) for b in message.blocks]


def test_a_block_of_the_tree_is_offered_again_when_its_swa_block_is_computed_anew() -> None:
    """The store may have lost it, or have it damaged: it can be written there once more."""
    loads = Loads(num_swa=20, write_back=True)
    assert offered(loads, 1, PROMPT[:90]) == [0, 1, 2, 3, 4]
    loads.plan(releases=(1,))
    loads.thin(PROMPT[:80], 1, 3, 4)
    assert offered(loads, 2, PROMPT[:90]) == [1, 3, 4], "it starts at 1, and 2 still has one"


def test_a_block_computed_twice_at_once_is_offered_once() -> None:
    loads = Loads(num_swa=20, write_back=True)
    loads.plan(new(1, PROMPT[:40]), new(2, PROMPT[:41]))
    told = loads.deliver(loads.ask(updates=(done(1, 40),)))
    assert isinstance(told[1], BlocksFilled)
    assert [block.index for block in told[1].blocks] == [0, 1]
    assert len(loads.deliver(loads.ask(updates=(done(2, 41),)))) == 1
