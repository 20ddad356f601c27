"""What all stores promise, tried on each: the same tests, with a way around the store to harm its values."""

from __future__ import annotations

import random

import pytest
import trio

from ksana.errors import RemoteCacheError
from ksana.stores import envelope
from ksana.stores.store import Store
from tests.stores.conftest import Place, new_key


def some_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


async def put(store: Store, key: bytes, value: bytes) -> None:
    await store.put(key, memoryview(value))


async def get(store: Store, key: bytes, size: int) -> bytes | None:
    """The value, or None."""
    into = bytearray(b"\xee" * size)
    if await store.get(key, memoryview(into)):
        return bytes(into)
    assert into == b"\xee" * size, "a value that is not there was written"
    return None


@pytest.mark.parametrize("size", [0, 1, 63, 64, 4096, 16384, 700_001])
async def test_round_trip(place: Place, size: int) -> None:
    store, key, value = place.open(), new_key(), some_bytes(size)
    await put(store, key, value)
    assert await get(store, key, size) == value
    assert await get(place.open(), key, size) == value
    await store.aclose()


@pytest.mark.parametrize("key", [b"\0", b"../../etc/passwd", b"\r\n$3\r\n", bytes(range(192, 256))])
async def test_a_key_is_any_bytes(place: Place, key: bytes) -> None:
    store = place.open()
    await put(store, key, b"value")
    assert await get(store, key, 5) == b"value"


async def test_missing(place: Place) -> None:
    store = place.open()
    assert await get(store, new_key(), 10) is None
    assert await store.contains([]) == []
    assert await store.contains([new_key(), new_key()]) == [False, False]


async def test_contains_says_which_in_order(place: Place) -> None:
    store = place.open()
    keys = [new_key() for _ in range(1100)]
    there = keys[::97]
    for key in there:
        await put(store, key, b"x")
    assert await store.contains(keys) == [key in there for key in keys]


async def test_the_last_value_counts_also_if_it_has_another_size(place: Place) -> None:
    store, key = place.open(), new_key()
    for value in (b"first", b"other", b"a longer one", b"s"):
        await put(store, key, value)
        assert await get(store, key, len(value)) == value


async def test_large(place: Place) -> None:
    store, key, value = place.open(), new_key(), some_bytes(32 << 20)
    await put(store, key, value)
    assert await get(store, key, len(value)) == value


async def test_many_at_once(place: Place) -> None:
    store = place.open()
    values = {new_key(): some_bytes(50_000, seed) for seed in range(40)}
    wrong: list[bytes] = []

    async def write_and_read(key: bytes, value: bytes) -> None:
        await put(store, key, value)
        if await get(store, key, len(value)) != value:
            wrong.append(key)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            for key, value in values.items():
                nursery.start_soon(write_and_read, key, value)
    assert not wrong


async def test_readers_see_the_old_or_the_new_value_while_it_is_replaced(place: Place) -> None:
    store, key = place.open(), new_key()
    values = [some_bytes(100_000, seed) for seed in range(2)]
    await put(store, key, values[0])
    seen: list[bytes | None] = []

    async def read() -> None:
        seen.extend([await get(store, key, 100_000) for _ in range(30)])

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            for turn in range(30):
                await put(store, key, values[turn % 2])
    assert len(seen) == 30
    assert set(seen) <= set(values)


@pytest.mark.parametrize("place_of_damage", [0, 3, 4, 6, 9, 20, 50, 100, 300, 2500, -1])
async def test_one_flipped_bit_anywhere_is_found(place: Place, place_of_damage: int) -> None:
    store, key, value = place.open(), new_key(), some_bytes(5000)
    await put(store, key, value)
    raw = bytearray(place.read_raw(key))
    raw[place_of_damage] ^= 0x10
    place.write_raw(key, bytes(raw))
    with pytest.raises(RemoteCacheError):
        await get(store, key, 5000)


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 40, 80, 150, 1000, 4999, -1])
async def test_truncated_is_found_and_forgotten(place: Place, kept: int) -> None:
    store, key, value = place.open(), new_key(), some_bytes(5000)
    await put(store, key, value)
    place.write_raw(key, place.read_raw(key)[:kept])
    with pytest.raises(RemoteCacheError):
        await get(store, key, 5000)
    assert await store.contains([key]) == [False]
    await put(store, key, value)
    assert await get(store, key, 5000) == value


async def test_bytes_that_follow_the_value_are_found(place: Place) -> None:
    store, key = place.open(), new_key()
    await put(store, key, b"value")
    place.write_raw(key, place.read_raw(key) + b"\0")
    with pytest.raises(RemoteCacheError):
        await get(store, key, 5)


async def test_the_value_of_another_key_is_found(place: Place) -> None:
    store, key, other = place.open(), new_key(), new_key()
    await put(store, key, b"mine")
    await put(store, other, b"your")
    place.write_raw(key, place.read_raw(other))
    with pytest.raises(RemoteCacheError):
        await get(store, key, 4)
    assert await get(store, other, 4) == b"your"


@pytest.mark.parametrize("size", [0, 4, 6, 500, 1 << 20])
async def test_a_value_of_another_size_is_an_error(place: Place, size: int) -> None:
    store, key = place.open(), new_key()
    await put(store, key, b"value")
    with pytest.raises(RemoteCacheError):
        await get(store, key, size)
    with trio.fail_after(10):
        assert await get(store, new_key(), 4) is None


async def test_nonsense_in_the_place_of_a_value_is_an_error(place: Place) -> None:
    store = place.open()
    for nonsense in (b"", b"null", b"\xff" * 8, b"{}" * 40, bytes(81 + 5), some_bytes(86)):
        key = new_key()
        place.write_raw(key, nonsense)
        with pytest.raises(RemoteCacheError):
            await get(store, key, 5)


async def test_limits(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store = place.open()
    for key in (b"", b"k" * (envelope.MAX_KEY_BYTES + 1)):
        with pytest.raises(RemoteCacheError):
            await get(store, key, 1)
        with pytest.raises(RemoteCacheError):
            await put(store, key, b"x")
        with pytest.raises(RemoteCacheError):
            await store.contains([key])
    monkeypatch.setattr(envelope, "MAX_PAYLOAD_BYTES", 100)
    with pytest.raises(RemoteCacheError):
        await put(store, new_key(), bytes(101))
    with pytest.raises(RemoteCacheError):
        await get(store, new_key(), 101)
    await put(store, new_key(), bytes(100))


async def test_calls_cancelled_at_any_moment_do_no_damage(place: Place) -> None:
    store, key = place.open(), new_key()
    values = [some_bytes(300_000, seed) for seed in range(2)]
    await put(store, key, values[0])
    num_cancelled = 0
    for attempt in range(60):
        into, data = bytearray(300_000), bytearray(values[attempt % 2])
        with trio.move_on_after(attempt * 0.00005) as reading:
            assert await store.get(key, memoryview(into))
        if reading.cancelled_caught:
            into[:] = b"\xaa" * len(into)
        with trio.move_on_after(attempt * 0.00005) as writing:
            await store.put(key, memoryview(data))
        data[:] = b"\xbb" * len(data)
        with trio.move_on_after(attempt * 0.00001) as asking:
            assert await store.contains([key]) == [True]
        num_cancelled += reading.cancelled_caught + writing.cancelled_caught + asking.cancelled_caught
        if attempt % 10 == 9:
            with trio.fail_after(10):
                assert await get(store, key, 300_000) in values
        if reading.cancelled_caught:
            assert into == b"\xaa" * len(into), "written to after the call was cancelled"
    assert num_cancelled > 10
