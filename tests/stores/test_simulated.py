from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from ksana.errors import RemoteCacheError
from ksana.runtime.virtual_clock import VirtualClock
from ksana.stores.simulated import SimulatedStore
from tests.stores.conftest import new_key

KEYS = [new_key() for _ in range(200)]


def on_virtual_time(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=VirtualClock())


async def put(store: SimulatedStore, key: bytes) -> None:
    await store.put(key, memoryview(key * 30))


async def outcome(store: SimulatedStore, key: bytes) -> str:
    into = bytearray(len(key) * 30)
    try:
        found = await store.get(key, memoryview(into))
    except RemoteCacheError:
        return "error"
    assert not found or into == key * 30
    return "hit" if found else "miss"


async def filled(seed: int = 7) -> SimulatedStore:
    store = SimulatedStore(seed)
    for key in KEYS:
        await put(store, key)
    return store


def test_time_is_latency_and_then_bytes_on_one_link() -> None:
    async def main() -> None:
        store = SimulatedStore(1, latency_s=0.5, jitter=0.0, bytes_per_s=1000.0)
        key, data = new_key(), bytes(2000)
        await store.put(key, memoryview(data))
        value_bytes = len(store.values[key])
        assert trio.current_time() == pytest.approx(0.5 + value_bytes / 1000)
        began = trio.current_time()
        await store.contains([key] * 100)
        assert trio.current_time() - began == pytest.approx(0.5)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(store.get, key, memoryview(bytearray(2000)))
        assert trio.current_time() - began == pytest.approx(0.5 + 3 * 2.0)
        store.faults.slowdown = 10
        began = trio.current_time()
        await store.get(key, memoryview(bytearray(2000)))
        assert trio.current_time() - began == pytest.approx(25)
        assert (store.counts.puts, store.counts.contains, store.counts.gets, store.counts.hits) == (
            1,
            1,
            4,
            4,
        )
        assert (store.counts.bytes_written, store.counts.bytes_read) == (2000, 8000)

    on_virtual_time(main)


def test_equal_seeds_give_equal_times() -> None:
    times: list[float] = []

    async def main() -> None:
        store = await filled(seed=3)
        await store.contains(KEYS)
        times.append(trio.current_time())

    on_virtual_time(main)
    on_virtual_time(main)
    assert times[0] == times[1]


def test_down_refuses_calls_under_way_too() -> None:
    async def main() -> None:
        store = await filled()
        began = trio.current_time()

        async def goes_down() -> None:
            await trio.sleep(0.0001)
            store.faults.down = True

        async with trio.open_nursery() as nursery:
            nursery.start_soon(goes_down)
            assert await outcome(store, KEYS[0]) == "error"
        assert trio.current_time() - began < 0.01
        for call in (lambda: store.contains(KEYS), lambda: put(store, KEYS[0])):
            with pytest.raises(RemoteCacheError):
                await call()  # type: ignore[operator]
        store.faults.down = False
        assert await outcome(store, KEYS[0]) == "hit"

    on_virtual_time(main)


def test_down_or_frozen_in_the_middle_of_a_value() -> None:
    async def main() -> None:
        store, key = SimulatedStore(1, bytes_per_s=1000.0), new_key()
        await put(store, key)
        ends: list[str] = []

        async def read() -> None:
            ends.append(await outcome(store, key))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.sleep(0.5)
            store.freeze()
            await trio.sleep(100)
            assert ends == []
            store.thaw()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.sleep(0.5)
            store.faults.down = True
        assert ends == ["hit", "error"]

    on_virtual_time(main)


def test_shares_hit_about_that_share_of_keys_and_always_the_same() -> None:
    async def main() -> None:
        store = await filled()
        store.faults.missing_share = 0.5
        there = await store.contains(KEYS)
        assert 70 < sum(there) < 130
        assert await store.contains(KEYS) == there
        assert [await outcome(store, key) for key in KEYS] == [
            "hit" if is_there else "miss" for is_there in there
        ]
        store.faults.missing_share = 0.0

        store.faults.vanishing_share = 0.5
        assert all(await store.contains(KEYS))
        outcomes = [await outcome(store, key) for key in KEYS]
        assert 70 < outcomes.count("miss") < 130
        assert outcomes.count("error") == 0
        store.faults.vanishing_share = 0.0

        assert {await outcome(store, key) for key in KEYS} == {"hit"}

    on_virtual_time(main)


@pytest.mark.parametrize("fault", ["corrupt_share", "truncated_share"])
def test_damage_is_found_in_earnest(fault: str) -> None:
    async def main() -> None:
        store = await filled()
        setattr(store.faults, fault, 0.5)
        outcomes = [await outcome(store, key) for key in KEYS]
        assert 70 < outcomes.count("error") < 130
        assert outcomes.count("miss") == 0
        setattr(store.faults, fault, 1.0)
        assert {await outcome(store, key) for key in KEYS} <= {"error", "miss"}

    on_virtual_time(main)


def test_frozen_answers_nothing_until_thawed_and_deadlines_hold() -> None:
    async def main() -> None:
        store = await filled()
        ends: list[str] = []

        async def read() -> None:
            ends.append(await outcome(store, KEYS[0]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.sleep(0.0001)
            store.freeze()
            began = trio.current_time()
            into = bytearray(len(KEYS[1]) * 30)
            with trio.move_on_after(2.0) as scope:
                await store.get(KEYS[1], memoryview(into))
            assert scope.cancelled_caught
            assert trio.current_time() - began == pytest.approx(2.0)
            assert ends == []
            store.thaw()
        assert ends == ["hit"]
        assert not any(into)
        assert await outcome(store, KEYS[1]) == "hit"

    on_virtual_time(main)


def test_a_closed_store_refuses_and_its_values_stay() -> None:
    async def main() -> None:
        store = await filled()
        await store.aclose()
        assert await outcome(store, KEYS[0]) == "error"
        other = SimulatedStore(8, values=store.values)
        assert await outcome(other, KEYS[0]) == "hit"

    on_virtual_time(main)
