"""What only Redis can do or suffer: real servers killed, frozen and guarded, and servers that are none."""

from __future__ import annotations

import random
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio

from ksana.errors import RemoteCacheError
from ksana.stores.envelope import DamagedValue, KeyFault
from ksana.stores.redis import RedisStore
from ksana.stores.redis_address import RedisAddress
from ksana.stores.store import Store, open_store
from tests.redis_server import RedisServer, free_port
from tests.stores.conftest import NEEDS_REDIS, new_key

BLOCK = 200_000


def opened(url: str) -> Store:
    return open_store(url, max_bytes=None)


def payload(key: bytes) -> bytes:
    return random.Random(key).randbytes(BLOCK)


async def put(store: Store, key: bytes) -> None:
    await store.put(key, memoryview(payload(key)))


async def has(store: Store, key: bytes) -> bool:
    into = bytearray(BLOCK)
    found = await store.get(key, memoryview(into))
    assert not found or into == payload(key)
    return found


# real servers


@NEEDS_REDIS
async def test_the_server_is_killed_and_comes_back_empty(own_redis: RedisServer) -> None:
    store, key = opened(own_redis.url), new_key()
    await put(store, key)
    own_redis.kill()
    with trio.fail_after(5):
        for call in (lambda: has(store, key), lambda: put(store, key), lambda: store.contains([key])):
            with pytest.raises(RemoteCacheError):
                await call()  # type: ignore[operator]
    own_redis.start()
    with trio.fail_after(5):
        assert not await has(store, key)
        await put(store, key)
        assert await has(store, key)


@NEEDS_REDIS
async def test_a_restart_between_calls_is_not_noticed(own_redis: RedisServer) -> None:
    store, key = opened(own_redis.url), new_key()
    async with trio.open_nursery() as nursery:
        for _ in range(4):  # every connection of the pool
            nursery.start_soon(put, store, key)
    own_redis.kill()
    own_redis.start()
    assert await store.contains([key]) == [False]
    await put(store, key)
    assert await has(store, key)


@NEEDS_REDIS
async def test_killed_while_calls_are_under_way_each_ends_with_an_error_or_well(
    own_redis: RedisServer,
) -> None:
    store = opened(own_redis.url)
    keys = [new_key() for _ in range(8)]
    ends: list[str] = []

    async def work(key: bytes) -> None:
        for _ in range(10_000):
            try:
                await put(store, key)
                await has(store, key)
            except RemoteCacheError:
                ends.append("error")
                return

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            for key in keys:
                nursery.start_soon(work, key)
            await trio.sleep(0.1)
            own_redis.kill()
    assert ends == ["error"] * 8


@NEEDS_REDIS
async def test_frozen_it_costs_every_call_its_deadline_and_thawed_it_works(own_redis: RedisServer) -> None:
    store, key = opened(own_redis.url), new_key()
    await put(store, key)
    own_redis.freeze()
    into = [bytearray(BLOCK) for _ in range(12)]
    num_cancelled = 0

    async def frozen(call: Callable[[], Awaitable[object]]) -> None:
        nonlocal num_cancelled
        with trio.move_on_after(0.2) as scope:
            await call()
        num_cancelled += scope.cancelled_caught

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for buffer in into:
            nursery.start_soon(frozen, lambda buffer=buffer: store.get(key, memoryview(buffer)))
        nursery.start_soon(frozen, lambda: put(store, key))
        nursery.start_soon(frozen, lambda: store.contains([key]))
    assert num_cancelled == 14
    assert trio.current_time() - began < 2
    own_redis.thaw()
    with trio.fail_after(5):
        for _ in range(10):
            assert await has(store, key)
    assert not any(any(buffer) for buffer in into)


@NEEDS_REDIS
async def test_frozen_in_the_middle_of_a_value(own_redis: RedisServer) -> None:
    store, key = opened(own_redis.url), new_key()
    size = 64 << 20
    value = memoryview(random.Random(1).randbytes(size))
    await store.put(key, value)
    into = bytearray(size)
    with trio.move_on_after(1.0) as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.get, key, memoryview(into))
            while not into[0]:
                await trio.lowlevel.checkpoint()
            own_redis.freeze()
    assert scope.cancelled_caught
    own_redis.thaw()
    with trio.fail_after(10):
        assert await store.get(key, memoryview(into))
    assert into == value


@NEEDS_REDIS
async def test_passwords(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = RedisServer(tmp_path, "--requirepass", "s@cret/1")
    server.start()
    try:
        key = new_key()
        for right in (
            f"redis://:s%40cret%2F1@127.0.0.1:{server.port}",
            f"redis://default:s%40cret%2F1@127.0.0.1:{server.port}/3",
        ):
            store = opened(right)
            await put(store, key)
            assert await has(store, key)
        for wrong, code in (("", "NOAUTH"), (":hunter2@", "WRONGPASS"), ("hunter3:hunter2@", "WRONGPASS")):
            store = opened(f"redis://{wrong}127.0.0.1:{server.port}")
            for _ in range(3):
                with pytest.raises(RemoteCacheError, match=code) as caught:
                    await has(store, key)
                assert "hunter" not in repr(caught.value)
    finally:
        server.kill()
    assert "hunter" not in caplog.text


@NEEDS_REDIS
async def test_databases_are_apart_and_one_that_is_not_there_is_an_error(shared_redis: RedisServer) -> None:
    key = new_key()
    await put(opened(f"{shared_redis.url}/1"), key)
    assert await has(opened(f"{shared_redis.url}/1"), key)
    assert not await has(opened(f"{shared_redis.url}/2"), key)
    with pytest.raises(RemoteCacheError, match="SELECT"):
        await has(opened(f"{shared_redis.url}/4000"), key)


@NEEDS_REDIS
async def test_a_server_without_room_refuses_and_goes_on_reading(own_redis: RedisServer) -> None:
    store, key = opened(own_redis.url), new_key()
    await put(store, key)
    own_redis.cli("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(RemoteCacheError, match="OOM"):
        await put(store, new_key())
    assert await has(store, key)


@NEEDS_REDIS
async def test_a_value_of_another_type_is_damage_and_deleted(shared_redis: RedisServer) -> None:
    key = new_key()
    shared_redis.cli("LPUSH", f"ksana:{key.hex()}", "x")
    store = opened(shared_redis.url)
    with pytest.raises(DamagedValue, match="WRONGTYPE"):
        await has(store, key)
    assert await store.contains([key]) == [False]


@NEEDS_REDIS
async def test_at_most_four_connections_and_all_are_closed(own_redis: RedisServer) -> None:
    def num_clients() -> int:
        """Without the one that asks."""
        return sum(b"cmd=client" not in line for line in own_redis.cli("CLIENT", "LIST").split(b"\n") if line)

    store = opened(own_redis.url)
    async with trio.open_nursery() as nursery:
        for _ in range(30):
            nursery.start_soon(put, store, new_key())
    assert num_clients() == 4
    for _ in range(10):
        with trio.move_on_after(0.001):
            await has(store, new_key())
    await store.aclose()
    await trio.sleep(0.1)
    assert num_clients() == 0
    with pytest.raises(RemoteCacheError, match="closed"):
        await has(store, new_key())


# servers that are none


class FakeServer:
    """Takes connections and answers every piece it reads with the next of `answers`; then it hangs up."""

    def __init__(self, *answers: bytes) -> None:
        self.port = free_port()
        self.heard = b""
        self._answers = answers

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        await trio.serve_tcp(self._talk, self.port, host="127.0.0.1", task_status=task_status)  # type: ignore[arg-type]

    async def _talk(self, stream: trio.SocketStream) -> None:
        async with stream:
            for answer in self._answers:
                self.heard += await stream.receive_some(65536)
                await stream.send_all(answer)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\nServer: nginx\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x15\x03\x01\x00\x02\x02\x50\r\n",
        bytes(50_000),
        b"\xff" * 50_000,
        b"+OK\r\n",
        b":1\r\n:1\r\n",
        b"*1\r\n$1\r\nx\r\n",
        b"$99999999999\r\nx",
        b"$300\r\nx",
        b"$-1\r\n$-1\r\n",
        b"-ERR \xff\xfe\r\n",
        b"$281\r\n" + bytes(281) + b"\r\n",
        b"$281\r\n" + bytes(281) + b"xx",
        b"",
    ],
)
async def test_a_server_that_talks_nonsense(nursery: trio.Nursery, answer: bytes) -> None:
    server = FakeServer(answer)
    await nursery.start(server.run)
    store = opened(f"redis://127.0.0.1:{server.port}")
    for _ in range(2):
        with trio.fail_after(5), pytest.raises(RemoteCacheError):
            await store.get(new_key(), memoryview(bytearray(200)))
    if answer != b"+OK\r\n":
        with trio.fail_after(5), pytest.raises(RemoteCacheError):
            await store.put(new_key(), memoryview(bytearray(200)))
    if answer not in (b":1\r\n:1\r\n",):
        with trio.fail_after(5), pytest.raises(RemoteCacheError):
            await store.contains([new_key()])
    nursery.cancel_scope.cancel()


class PatientServer(FakeServer):
    """Answers what comes first, and then only listens."""

    async def _talk(self, stream: trio.SocketStream) -> None:
        async with stream:
            self.heard += await stream.receive_some(65536)
            await stream.send_all(self._answers[0])
            async for more in stream:
                self.heard += more


@pytest.mark.parametrize(
    ("answer", "is_keys"),
    [
        (b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n", True),
        (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", False),
        (b"-READONLY You can't write against a read only replica.\r\n", False),
        (b"-NOAUTH Authentication required.\r\n", False),
        (b"-NOPERM this user has no permissions to run the 'set' command\r\n", False),
        (b"-LOADING Redis is loading the dataset in memory\r\n", False),
        (b"-MISCONF Redis is configured to save RDB snapshots\r\n", False),
        (b"-ERR something\r\n", False),
    ],
)
async def test_whose_fault_an_error_is(nursery: trio.Nursery, answer: bytes, is_keys: bool) -> None:
    server = PatientServer(answer)
    await nursery.start(server.run)
    store = opened(f"redis://127.0.0.1:{server.port}")
    with trio.fail_after(5), pytest.raises(RemoteCacheError, match=answer[1:5].decode()) as told:
        await store.put(new_key(), memoryview(bytes(100)))
    assert isinstance(told.value, KeyFault) == is_keys
    if is_keys:
        assert await store.contains([new_key()]) == [False]
    else:
        with pytest.raises(RemoteCacheError) as told:
            await store.contains([new_key()])
        assert not isinstance(told.value, KeyFault | DamagedValue)
    nursery.cancel_scope.cancel()


async def test_a_password_that_the_server_repeats_is_not_passed_on(nursery: trio.Nursery) -> None:
    server = FakeServer(b"-ERR unknown command `AUTH`, with args beginning with: `hunter2`\r\n")
    await nursery.start(server.run)
    store = opened(f"redis://:hunter2@127.0.0.1:{server.port}")
    with pytest.raises(RemoteCacheError, match="AUTH with 'ERR'") as caught:
        await store.contains([new_key()])
    assert b"hunter2" in server.heard
    assert "hunter2" not in repr(caught.value)
    nursery.cancel_scope.cancel()


@pytest.fixture
def deaf_port() -> Iterator[int]:
    """Connections are taken by the kernel; nobody reads or answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(50)
        yield listening.getsockname()[1]


async def test_a_put_that_nobody_reads_ends_at_its_deadline(deaf_port: int) -> None:
    store = opened(f"redis://127.0.0.1:{deaf_port}")
    with trio.fail_after(5):
        with trio.move_on_after(0.1) as scope:
            await store.put(new_key(), memoryview(bytes(32 << 20)))
    assert scope.cancelled_caught


async def test_closing_ends_calls_under_way(deaf_port: int) -> None:
    store = opened(f"redis://127.0.0.1:{deaf_port}")
    ended: list[str] = []

    async def ask() -> None:
        with pytest.raises(RemoteCacheError):
            await store.contains([new_key()])
        ended.append("error")

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(ask)
            await trio.sleep(0.05)
            await store.aclose()
    assert ended == ["error"] * 6


async def test_nobody_listens_and_no_such_host_and_no_such_socket(tmp_path: Path) -> None:
    addresses = [
        RedisAddress(host="127.0.0.1", port=free_port()),
        RedisAddress(host="no-such-host.invalid"),
        RedisAddress(socket_path=str(tmp_path / "none")),
        RedisAddress(socket_path="/" + "x" * 300),
        RedisAddress(host="x" * 300),
    ]
    for address in addresses:
        with trio.fail_after(10), pytest.raises(RemoteCacheError):
            await RedisStore(address).contains([new_key()])
