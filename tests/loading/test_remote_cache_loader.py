"""Single histories, message by message; `tests.stateful.test_loader_machine` has all the others."""

from typing import Any

import pytest

from ksana.cache.chain_keys import chain_keys, root_key
from ksana.errors import InvariantViolated
from ksana.loading.remote_cache_loader import RemoteCacheLoader
from ksana.loading.settings import LoaderSettings
from ksana.messages.base import Message
from ksana.messages.blocks import NO_BLOCK, ResetPools
from ksana.messages.remote import (
    AllocateBlocksForRemoteCache,
    BlocksFilled,
    BlocksHeld,
    CancelLoad,
    ConfirmRemoteCacheLoadingResult,
    DropRemoteCacheLoading,
    FilledBlock,
    GetRequestPrefixBlockNumberBeforeRemoteCacheLoading,
    HeldBlock,
    HoldBlocks,
    LoadPrefix,
    PrefixBlockNumber,
    PrefixLoaded,
    ReleaseHeldBlocks,
    RemoteBlocksAllocated,
    RemoteCallRefused,
    RemoteLoadingConfirmed,
)
from ksana.messages.staging import CopyFromStaging, CopyToStaging, StagedBlock, StagingCopied
from ksana.messages.stores import (
    StoredBlock,
    StoreFetch,
    StoreFetched,
    StoreFind,
    StoreFound,
    StoreSave,
    StoreSaved,
)
from ksana.messages.swa import FaBlock

TOKENS = tuple(range(200))
KEYS = chain_keys(root_key(b"model", "salt"), TOKENS, 16)
"""B=16, W=64, a prompt of 200 tokens: the worked example."""


def settings(**changes: object) -> LoaderSettings:
    values: dict[str, object] = {
        "identity": b"model",
        "block_size": 16,
        "fa_block_bytes": 100,
        "swa_block_bytes": 300,
        "window_blocks": 4,
        "num_slots": 32,
        "blocks_per_fetch": 16,
    }
    return LoaderSettings(**{**values, **changes})  # type: ignore[arg-type]


class Bench:
    def __init__(self, **changes: object) -> None:
        self.core = RemoteCacheLoader(settings(**changes))
        self.now_s = 10.0
        assert self.tell(ResetPools(pool_epoch=1)) == []

    def tell(self, *messages: Message, after_s: float = 0.0) -> list[Message]:
        self.now_s += after_s
        said = self.core.handle(self.now_s, messages)
        self.core.check()
        return [message for _, message in said]

    def load(
        self, tokens: tuple[int, ...] = TOKENS, speed: float = 0.0, give_up_after_s: float = 5.0
    ) -> list[Message]:
        return self.tell(
            LoadPrefix(
                pool_epoch=1,
                request_id=7,
                token_ids=tokens,
                cache_salt="salt",
                num_reserved_tokens=300,
                give_up_at_s=self.now_s + give_up_after_s,
                prefill_tokens_per_s=speed,
            )
        )

    def probe(
        self, fa: int = 5, swa: int = 0, valid: tuple[bool, ...] = (False, False, True, True, True)
    ) -> Any:
        self.load()
        (find,) = self.tell(
            PrefixBlockNumber(pool_epoch=1, request_id=7, fa_block_num=fa, swa_block_num=swa, swa_valid=valid)
        )
        return find

    def reserve(self) -> StoreFetch:
        """The worked example up to the fetch of FA 5 to 10 (11 is not there) and SWA 7 to 10."""
        find = self.probe()
        assert isinstance(find, StoreFind)
        found = tuple(key != KEYS[11] + b"f" for key in find.keys)
        (allocate,) = self.tell(StoreFound(op_id=find.op_id, found=found, seconds=0.01))
        assert allocate == AllocateBlocksForRemoteCache(
            pool_epoch=1, request_id=7, fa_block_num=6, swa_block_num=4
        )
        (fetch,) = self.tell(
            RemoteBlocksAllocated(
                pool_epoch=1,
                request_id=7,
                fa_block_ids=tuple(range(20, 26)),
                swa_block_ids=tuple(range(40, 44)),
            )
        )
        assert isinstance(fetch, StoreFetch)
        return fetch


def confirm(matched: int, swa: tuple[int, ...], reserved: int) -> ConfirmRemoteCacheLoadingResult:
    return ConfirmRemoteCacheLoadingResult(
        pool_epoch=1,
        request_id=7,
        matched_block_index=matched,
        matched_remote_swa_block_indexs=swa,
        reserved_block_num=reserved,
    )


def loaded(outcome: str, **more: object) -> PrefixLoaded:
    values = {"holds_blocks": False, **more}
    return PrefixLoaded(pool_epoch=1, request_id=7, outcome=outcome, **values)  # type: ignore[arg-type]


def test_the_worked_example() -> None:
    b = Bench()
    assert [type(m) for m in b.load()] == [GetRequestPrefixBlockNumberBeforeRemoteCacheLoading]
    b = Bench()
    fetch = b.reserve()
    assert [(block.key, block.num_bytes) for block in fetch.blocks] == [
        *((KEYS[i] + b"f", 100) for i in range(5, 11)),
        *((KEYS[i] + b"s", 300) for i in range(7, 11)),
    ]
    copy, confirmed = b.tell(StoreFetched(op_id=fetch.op_id, results=("ok",) * 10, seconds=0.1), after_s=0.1)
    slots = [block.slot for block in fetch.blocks]
    assert isinstance(copy, CopyFromStaging)
    assert copy.blocks == tuple(
        StagedBlock(pool=pool, block_id=block_id, slot=slot)  # type: ignore[arg-type]
        for (pool, block_id), slot in zip(
            [*(("fa", i) for i in range(20, 26)), *(("swa", i) for i in range(40, 44))], slots, strict=True
        )
    )
    assert confirmed == confirm(11, (7, 8, 9, 10), 0)
    end = b.tell(
        RemoteLoadingConfirmed(pool_epoch=1, request_id=7, cached_blocks=11, num_remote_blocks=11),
    )
    assert end == [loaded("loaded", holds_blocks=True, num_cached_tokens=176, num_remote_tokens=176)]
    assert not set(slots) & set(b.core.state.free_load_slots), "the worker has not copied them yet"
    b.tell(StagingCopied(pool_epoch=1, copy_id=copy.copy_id))
    assert set(slots) <= set(b.core.state.free_load_slots)
    status = b.core.status()
    assert status.num_loads == (("loaded", 1),)
    assert (status.num_loaded_blocks, status.num_loaded_bytes) == (10, 1800)
    assert status.num_loaded_tokens == 176


@pytest.mark.parametrize(
    ("bad", "result", "matched", "swa", "reserved"),
    [
        (8, "corrupt", 11, (7, 8, -1, 10), 0),  # SWA 9
        (5, "missing", 10, (7, 8, 9, -1), 1),  # FA 10
        (0, "failed", 5, (-1, -1, -1, -1), 6),  # FA 5
    ],
)
def test_what_came_is_used(bad: int, result: str, matched: int, swa: tuple[int, ...], reserved: int) -> None:
    b = Bench()
    fetch = b.reserve()
    results = tuple(result if at == bad else "ok" for at in range(10))
    error = None if result == "missing" else "trouble"
    _, confirmed = b.tell(StoreFetched(op_id=fetch.op_id, results=results, seconds=0.1, error=error))  # type: ignore[arg-type]
    assert confirmed == confirm(matched, swa, reserved)
    end = b.tell(RemoteLoadingConfirmed(pool_epoch=1, request_id=7, cached_blocks=0, num_remote_blocks=0))
    assert end == [loaded("partial", holds_blocks=True)]
    events = b.core.take_events()
    assert any("the rest is computed" in event.text for event in events) == (error is not None)


def test_a_prompt_of_one_block_has_nothing_to_load() -> None:
    assert Bench().load(tokens=tuple(range(16))) == [loaded("nothing")]


def test_nothing_in_the_store_confirms_the_local_hit() -> None:
    b = Bench()
    find = b.probe()
    said = b.tell(StoreFound(op_id=find.op_id, found=(False,) * len(find.keys), seconds=0.01))
    assert said == [confirm(5, (), 0)]
    end = b.tell(RemoteLoadingConfirmed(pool_epoch=1, request_id=7, cached_blocks=0, num_remote_blocks=0))
    assert end == [loaded("nothing", holds_blocks=True)]


def test_a_full_local_hit_asks_no_store() -> None:
    b = Bench()
    assert b.probe(fa=12, swa=12, valid=(True,) * 12) == confirm(12, (), 0)


def test_only_what_is_not_here_is_asked_for() -> None:
    find = Bench().probe()
    assert find.keys == (
        *(KEYS[i] + b"f" for i in range(5, 12)),
        *(KEYS[i] + b"s" for i in (0, 1, *range(5, 12))),
    )


def test_a_load_that_is_slower_than_computing_is_not_begun() -> None:
    b = Bench()
    b.core.state.speed.loaded(num_bytes=1800, seconds=2.0, now_s=b.now_s)
    b.load(speed=100.0)  # 176 tokens take 1.76 s
    (find,) = b.tell(PrefixBlockNumber(pool_epoch=1, request_id=7, fa_block_num=5, swa_block_num=0))
    assert isinstance(find, StoreFind)
    found = tuple(key != KEYS[11] + b"f" for key in find.keys)
    said = b.tell(StoreFound(op_id=find.op_id, found=found, seconds=0.01))
    assert said == [confirm(5, (), 0)]
    end = b.tell(RemoteLoadingConfirmed(pool_epoch=1, request_id=7, cached_blocks=0, num_remote_blocks=0))
    assert end == [loaded("not_worth_it", holds_blocks=True)]


def refused(call: str, reason: str = "no_room") -> RemoteCallRefused:
    return RemoteCallRefused(pool_epoch=1, request_id=7, call=call, reason=reason, detail="why")  # type: ignore[arg-type]


DROP = DropRemoteCacheLoading(pool_epoch=1, request_id=7)


def test_no_room() -> None:
    b = Bench()
    b.load()
    assert b.tell(refused("GetRequestPrefixBlockNumberBeforeRemoteCacheLoading")) == [loaded("no_room")]
    b = Bench()
    find = b.probe()
    b.tell(StoreFound(op_id=find.op_id, found=(True,) * len(find.keys), seconds=0.01))
    assert b.tell(refused("AllocateBlocksForRemoteCache")) == [DROP, loaded("no_room")]


def test_a_refusal_that_should_not_be_is_told() -> None:
    b = Bench()
    b.load()
    b.tell(refused("GetRequestPrefixBlockNumberBeforeRemoteCacheLoading", "bad_arguments"))
    assert [event.level for event in b.core.take_events()] == ["error"]


def test_cancelled_in_every_state() -> None:
    cancel = CancelLoad(request_id=7)
    assert Bench().tell(cancel) == []

    b = Bench()  # probing
    b.load()
    assert b.tell(cancel) == []
    answer = PrefixBlockNumber(pool_epoch=1, request_id=7, fa_block_num=5, swa_block_num=0)
    assert b.tell(answer) == [DROP, loaded("cancelled")]

    b = Bench()  # finding
    find = b.probe()
    assert b.tell(cancel) == [DROP, loaded("cancelled")]
    assert b.tell(StoreFound(op_id=find.op_id, found=(True,) * len(find.keys), seconds=0.01)) == []

    b = Bench()  # reserving
    find = b.probe()
    b.tell(StoreFound(op_id=find.op_id, found=(True,) * len(find.keys), seconds=0.01))
    assert b.tell(cancel) == []
    assert b.tell(
        RemoteBlocksAllocated(
            pool_epoch=1, request_id=7, fa_block_ids=tuple(range(7)), swa_block_ids=tuple(range(4))
        )
    ) == [DROP, loaded("cancelled")]

    b = Bench()  # fetching
    fetch = b.reserve()
    assert b.tell(cancel) == [DROP, loaded("cancelled")]
    slots = {block.slot for block in fetch.blocks}
    assert not slots & set(b.core.state.free_load_slots), "the store may still write into them"
    assert b.tell(StoreFetched(op_id=fetch.op_id, results=("ok",) * 10, seconds=0.1)) == []
    assert slots <= set(b.core.state.free_load_slots)

    b = Bench()  # confirming
    fetch = b.reserve()
    b.tell(StoreFetched(op_id=fetch.op_id, results=("ok",) * 10, seconds=0.1))
    assert b.tell(cancel) == []
    confirmed = RemoteLoadingConfirmed(pool_epoch=1, request_id=7, cached_blocks=11, num_remote_blocks=11)
    assert b.tell(confirmed) == [DROP, loaded("cancelled")]


def test_a_second_load_of_the_same_request_is_a_bug() -> None:
    b = Bench()
    b.load()
    with pytest.raises(InvariantViolated, match="request 7"):
        b.load()


def test_the_deadline_uses_what_has_come() -> None:
    b = Bench(blocks_per_fetch=2)
    find = b.probe()
    b.tell(StoreFound(op_id=find.op_id, found=(True,) * len(find.keys), seconds=0.01))
    pieces = b.tell(
        RemoteBlocksAllocated(
            pool_epoch=1, request_id=7, fa_block_ids=tuple(range(20, 27)), swa_block_ids=(40, 41, 42, 43)
        )
    )
    assert [len(piece.blocks) for piece in pieces if isinstance(piece, StoreFetch)] == [2, 2, 2, 2]
    assert all(
        (piece.deadline_s, piece.timeout_s) == (b.now_s + 4.95, 2)
        for piece in pieces
        if isinstance(piece, StoreFetch)
    )
    b.tell(StoreFetched(op_id=pieces[0].op_id, results=("ok", "ok"), seconds=0.1))  # type: ignore[attr-defined]
    timer = b.core.next_timer_s()
    assert timer == 15.0
    assert b.tell(after_s=4.0) == []
    said = b.tell(after_s=1.0)
    assert said == [confirm(7, (-1, -1, -1, -1), 5)]


def test_a_deadline_while_finding() -> None:
    b = Bench()
    find = b.probe()
    assert find.deadline_s == b.now_s + 1
    assert b.tell(after_s=5.0) == [confirm(5, (), 0)]
    end = b.tell(RemoteLoadingConfirmed(pool_epoch=1, request_id=7, cached_blocks=0, num_remote_blocks=0))
    assert end == [loaded("store_failed", holds_blocks=True)]


def test_a_dead_store_costs_one_deadline_and_then_nothing() -> None:
    b = Bench()
    find = b.probe()
    said = b.tell(
        StoreFound(op_id=find.op_id, found=(), seconds=1.0, error="no answer", timed_out=True), after_s=1.0
    )
    assert said == [confirm(5, (), 0)]
    assert [event.level for event in b.core.take_events()] == ["warning"]
    b.tell(RemoteLoadingConfirmed(pool_epoch=1, request_id=7, cached_blocks=0, num_remote_blocks=0))
    assert b.load() == [loaded("store_failed")]
    assert not b.core.status().store_ok
    timer = b.core.next_timer_s()
    assert timer is not None
    (probe,) = b.tell(after_s=timer - b.now_s)
    assert isinstance(probe, StoreFind)
    assert b.load() == [loaded("store_failed")], "nobody waits for the probe"
    b.tell(StoreFound(op_id=probe.op_id, found=(False,), seconds=0.01))
    assert [event.level for event in b.core.take_events()] == ["info"]
    assert b.core.status().store_ok
    assert [type(m) for m in b.load()] == [GetRequestPrefixBlockNumberBeforeRemoteCacheLoading]
    assert b.core.status().num_loads == (("store_failed", 3),)


def test_a_load_that_ends_soon_says_little_about_the_store() -> None:
    """One order cut short by its load's deadline does not shut the store out, three in a row do."""
    b = Bench()
    for number in range(1, 4):
        b.load(give_up_after_s=0.2)
        (find,) = b.tell(PrefixBlockNumber(pool_epoch=1, request_id=7, fa_block_num=0, swa_block_num=0))
        assert isinstance(find, StoreFind)
        assert find.deadline_s == pytest.approx(b.now_s + 0.15)
        b.tell(StoreFound(op_id=find.op_id, found=(), seconds=0.15, error="late", timed_out=True))
        b.tell(RemoteLoadingConfirmed(pool_epoch=1, request_id=7, cached_blocks=0, num_remote_blocks=0))
        assert b.core.status().store_ok == (number < 3)
    assert b.core.status().num_store_timeouts == 3


def test_a_reset_ends_every_load_and_keeps_the_slots_of_the_store() -> None:
    b = Bench()
    fetch = b.reserve()
    assert b.tell(ResetPools(pool_epoch=2)) == [loaded("reset")]
    assert b.tell(StoreFetched(op_id=fetch.op_id, results=("ok",) * 10, seconds=0.1)) == []
    late = PrefixBlockNumber(pool_epoch=1, request_id=7, fa_block_num=0, swa_block_num=0)
    assert b.tell(late) == []
    assert b.load() == [loaded("reset")], "said before the scheduler knew"
    assert b.core.status().num_late_answers == 2


def filled(*numbers: int) -> BlocksFilled:
    return BlocksFilled(
        pool_epoch=1,
        blocks=tuple(
            FilledBlock(block=FaBlock(fa_block_id=n, generation=1), chain_key=b"%032d" % n, index=n)
            for n in numbers
        ),
    )


def held(*pairs: tuple[int, int]) -> tuple[HeldBlock, ...]:
    return tuple(
        HeldBlock(block=FaBlock(fa_block_id=fa, generation=1), swa_block_id=swa) for fa, swa in pairs
    )


def test_filled_blocks_are_written_back_once() -> None:
    b = Bench()
    (hold,) = b.tell(filled(1, 2))
    assert isinstance(hold, HoldBlocks)
    (copy,) = b.tell(BlocksHeld(pool_epoch=1, hold_id=hold.hold_id, held=held((1, 61), (2, NO_BLOCK))))
    assert isinstance(copy, CopyToStaging)
    assert [(block.pool, block.block_id) for block in copy.blocks] == [("fa", 1), ("swa", 61), ("fa", 2)]
    (save,) = b.tell(StagingCopied(pool_epoch=1, copy_id=copy.copy_id))
    assert isinstance(save, StoreSave)
    assert save.blocks == tuple(
        StoredBlock(key=b"%032d" % n + kind, slot=block.slot, num_bytes=num_bytes)
        for (n, kind, num_bytes), block in zip(
            [(1, b"f", 100), (1, b"s", 300), (2, b"f", 100)], copy.blocks, strict=True
        )
    )
    said = b.tell(StoreSaved(op_id=save.op_id, results=("ok", "ok", "failed"), seconds=0.1, error="full"))
    assert said == [ReleaseHeldBlocks(pool_epoch=1, hold_id=hold.hold_id)]
    status = b.core.status()
    assert (status.num_saved_blocks, status.num_saved_bytes, status.num_unsaved_blocks) == (2, 400, 1)
    (again,) = b.tell(filled(1, 2))
    assert isinstance(again, HoldBlocks)
    assert [block.fa_block_id for block in again.blocks] == [2], "the first is known to be there"


def test_a_queue_that_is_full_takes_no_more_and_holds_that_find_nothing_end() -> None:
    b = Bench(max_queued_blocks=3, saves_in_flight=1)
    (hold,) = b.tell(filled(*range(5)))
    assert isinstance(hold, HoldBlocks)
    assert len(hold.blocks) == 3
    assert b.core.status().num_unsaved_blocks == 2
    said = b.tell(BlocksHeld(pool_epoch=1, hold_id=hold.hold_id, held=()))
    assert said == [ReleaseHeldBlocks(pool_epoch=1, hold_id=hold.hold_id)]
    assert b.core.status().num_unsaved_blocks == 5


def test_nothing_is_written_back_where_it_is_switched_off_or_the_store_is_not_used() -> None:
    assert Bench(write_back=False).tell(filled(1)) == []
    b = Bench()
    find = b.probe()
    b.tell(StoreFound(op_id=find.op_id, found=(), seconds=1.0, error="no", timed_out=True))
    assert b.tell(filled(1)) == []
    assert b.core.status().num_queued_blocks == 1


def save(b: Bench, number: int) -> StoreSave:
    (hold,) = b.tell(filled(number))
    assert isinstance(hold, HoldBlocks)
    (copy,) = b.tell(BlocksHeld(pool_epoch=1, hold_id=hold.hold_id, held=held((number, NO_BLOCK))))
    assert isinstance(copy, CopyToStaging)
    (order,) = b.tell(StagingCopied(pool_epoch=1, copy_id=copy.copy_id))
    assert isinstance(order, StoreSave)
    return order


def test_saves_that_fail_switch_off_saving_and_never_reading() -> None:
    b = Bench()
    for number in range(3):
        order = save(b, number)
        b.tell(StoreSaved(op_id=order.op_id, results=("failed",), seconds=0.1, error="disk full"))
    assert [event.text for event in b.core.take_events()] == [
        "nothing is saved in the remote cache for 1 s: disk full"
    ]
    assert b.tell(filled(3, 4)) == []
    status = b.core.status()
    assert (status.store_ok, status.saves_ok) == (True, False)
    assert (status.num_queued_blocks, status.num_unsaved_blocks) == (0, 5)
    assert status.num_breaker_openings == 1
    assert isinstance(b.probe(), StoreFind)

    b.tell(after_s=1.0)
    order = save(b, 5)  # on probation: one failure is enough, and the wait is doubled
    b.tell(StoreSaved(op_id=order.op_id, results=("failed",), seconds=0.1, error="disk full"))
    assert b.tell(filled(6), after_s=1.9) == []
    b.tell(after_s=0.1)
    order = save(b, 6)
    b.tell(StoreSaved(op_id=order.op_id, results=("ok",), seconds=0.1))
    order = save(b, 7)
    b.tell(StoreSaved(op_id=order.op_id, results=("failed",), seconds=0.1, error="disk full"))
    save(b, 8)


def test_faults_of_keys_switch_nothing_off_and_are_told_now_and_then() -> None:
    b = Bench()
    for number in range(30):
        order = save(b, number)
        said = StoreSaved(
            op_id=order.op_id, results=("unusable",), seconds=0.1, error=f"{number} is a directory"
        )
        b.tell(said)
    status = b.core.status()
    assert (status.store_ok, status.saves_ok, status.num_breaker_openings) == (True, True, 0)
    assert (status.num_unusable_blocks, status.num_unsaved_blocks, status.num_store_errors) == (30, 30, 0)
    events = [event.text for event in b.core.take_events()]
    assert len(events) == 2
    assert "so far 1 blocks" in events[0]
    assert "so far 10 blocks" in events[1]
    assert "9 is a directory" in events[1]
    for number in range(30, 33):  # nor do they excuse those of the store
        order = save(b, number)
        b.tell(StoreSaved(op_id=order.op_id, results=("failed",), seconds=0.1, error="disk full"))
        if number < 32:
            order = save(b, number + 100)
            b.tell(StoreSaved(op_id=order.op_id, results=("unusable",), seconds=0.1, error="a directory"))
    assert not b.core.status().saves_ok


def test_blocks_that_cannot_be_read_for_what_stands_in_their_places_are_computed() -> None:
    b = Bench()
    for _ in range(5):
        fetch = b.reserve()
        results = ("unusable",) * 4 + ("ok",) * 6
        answer = StoreFetched(op_id=fetch.op_id, results=results, seconds=0.1, error="a pipe")  # type: ignore[arg-type]
        assert any(isinstance(message, CopyFromStaging) for message in b.tell(answer))
        assert KEYS[5] + b"f" not in b.core.state.known_keys, "to be written anew"
        (copy,) = b.core.state.copies
        b.tell(StagingCopied(pool_epoch=1, copy_id=copy))
        end_load(b)
    status = b.core.status()
    assert (status.store_ok, status.num_unusable_blocks, status.num_breaker_openings) == (True, 20, 0)
    assert len(b.core.take_events()) == 2, "and no line for each request"


def test_a_save_that_is_late_switches_off_saving_alone() -> None:
    b = Bench()
    order = save(b, 1)
    b.tell(StoreSaved(op_id=order.op_id, results=("failed",), seconds=10.0, error="late", timed_out=True))
    assert b.tell(filled(2)) == []
    assert b.core.status().store_ok


def end_load(b: Bench) -> None:
    b.tell(RemoteLoadingConfirmed(pool_epoch=1, request_id=7, cached_blocks=0, num_remote_blocks=0))


def test_finds_that_succeed_do_not_excuse_fetches_that_fail() -> None:
    b = Bench()
    for number in range(1, 4):
        fetch = b.reserve()
        b.tell(StoreFetched(op_id=fetch.op_id, results=("failed",) * 10, seconds=0.1, error="I/O error"))
        end_load(b)
        assert b.core.status().store_ok == (number < 3)


def test_the_wait_grows_while_fetches_hang_though_finds_are_answered() -> None:
    b = Bench()
    waits = []
    for _ in range(4):
        fetch = b.reserve()
        late = StoreFetched(
            op_id=fetch.op_id, results=("failed",) * 10, seconds=2.0, error="late", timed_out=True
        )
        b.tell(late, after_s=2.0)
        end_load(b)
        timer = b.core.next_timer_s()
        assert timer is not None
        waits.append(round(timer - b.now_s, 3))
        (probe,) = b.tell(after_s=timer - b.now_s)
        assert isinstance(probe, StoreFind)
        b.tell(StoreFound(op_id=probe.op_id, found=(False,), seconds=0.01))
    assert waits == [1.0, 2.0, 4.0, 8.0]


def test_a_fetch_is_judged_by_the_time_it_had() -> None:
    b = Bench()
    for _ in range(5):  # its turn never came
        fetch = b.reserve()
        b.tell(
            StoreFetched(op_id=fetch.op_id, results=("failed",) * 10, seconds=0.0, error="q", timed_out=True)
        )
        end_load(b)
    assert b.core.status().store_ok
    fetch = b.reserve()  # its turn came late: no more than a failure
    b.tell(StoreFetched(op_id=fetch.op_id, results=("failed",) * 10, seconds=1.0, error="q", timed_out=True))
    end_load(b)
    assert b.core.status().store_ok


def test_once_the_store_is_given_up_no_load_waits_for_its_orders() -> None:
    b = Bench(blocks_per_fetch=8)
    find = b.probe()
    b.tell(StoreFound(op_id=find.op_id, found=(True,) * len(find.keys), seconds=0.01))
    first, second = b.tell(
        RemoteBlocksAllocated(
            pool_epoch=1, request_id=7, fa_block_ids=tuple(range(20, 27)), swa_block_ids=(40, 41, 42, 43)
        )
    )
    assert isinstance(first, StoreFetch)
    assert isinstance(second, StoreFetch)
    late = StoreFetched(op_id=first.op_id, results=("failed",) * 8, seconds=2.0, error="late", timed_out=True)
    assert b.tell(late, after_s=2.0) == [confirm(5, (-1, -1, -1, -1), 7)]
    slots = {block.slot for block in second.blocks}
    assert not slots & set(b.core.state.free_load_slots), "the store may still write into them"
    assert b.tell(StoreFetched(op_id=second.op_id, results=("ok",) * 3, seconds=0.1)) == []
    end_load(b)
    assert b.core.status().num_loads == (("store_failed", 1),)


def test_values_that_cannot_be_read_are_written_anew() -> None:
    b = Bench()
    fetch = b.reserve()
    assert KEYS[5] + b"f" in b.core.state.known_keys
    results = ("failed",) + ("ok",) * 9
    b.tell(StoreFetched(op_id=fetch.op_id, results=results, seconds=0.1, error="a value of format 9"))  # type: ignore[arg-type]
    assert KEYS[5] + b"f" not in b.core.state.known_keys
    assert KEYS[6] + b"f" in b.core.state.known_keys

    b = Bench()  # out of reach: nothing was read
    fetch = b.reserve()
    b.tell(StoreFetched(op_id=fetch.op_id, results=("failed",) * 10, seconds=2.0, error="", timed_out=True))
    assert KEYS[5] + b"f" in b.core.state.known_keys


def test_settings_that_cannot_work() -> None:
    with pytest.raises(ValueError, match="no room"):
        settings(num_slots=3)
    with pytest.raises(ValueError, match="window"):
        settings(window_blocks=0)
    with pytest.raises(ValueError, match="without bytes"):
        settings(fa_block_bytes=0, swa_block_bytes=0, window_blocks=0)


def test_a_message_nobody_should_send() -> None:
    with pytest.raises(InvariantViolated, match="HoldBlocks"):
        Bench().tell(HoldBlocks(pool_epoch=1, hold_id=1, blocks=()))
