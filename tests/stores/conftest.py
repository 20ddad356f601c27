"""Places where a store keeps its values, with a way around the store to harm them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from ksana.stores.filesystem import FilesystemStore
from ksana.stores.simulated import SimulatedStore
from ksana.stores.store import Store, open_store
from tests.redis_server import RedisServer

NEEDS_REDIS = pytest.mark.needs_program("redis-server", "redis-server")
_numbers = itertools.count()


def new_key() -> bytes:
    """As the loader makes them; never the same twice."""
    return hashlib.sha256(f"test {next(_numbers)}".encode()).digest() + b"f"


class Place(Protocol):
    def open(self) -> Store: ...
    def read_raw(self, key: bytes) -> bytes: ...
    def write_raw(self, key: bytes, value: bytes) -> None: ...


class Directory:
    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self) -> FilesystemStore:
        return FilesystemStore.open(str(self.root), max_bytes=None)

    def path(self, key: bytes) -> Path:
        return self.root / key.hex()[:2] / f"{key.hex()}.safetensors"

    def read_raw(self, key: bytes) -> bytes:
        return self.path(key).read_bytes()

    def write_raw(self, key: bytes, value: bytes) -> None:
        self.path(key).parent.mkdir(exist_ok=True, parents=True)
        self.path(key).write_bytes(value)


class Redis:
    def __init__(self, server: RedisServer, url: str) -> None:
        self.server = server
        self.url = url

    def open(self) -> Store:
        return open_store(self.url, max_bytes=None)

    def read_raw(self, key: bytes) -> bytes:
        return self.server.cli("GET", f"ksana:{key.hex()}")

    def write_raw(self, key: bytes, value: bytes) -> None:
        self.server.cli("SET", f"ksana:{key.hex()}", stdin=value)


class Simulated:
    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    def open(self) -> SimulatedStore:
        return SimulatedStore(1, latency_s=0.0005, values=self.values)

    def read_raw(self, key: bytes) -> bytes:
        return self.values[key]

    def write_raw(self, key: bytes, value: bytes) -> None:
        self.values[key] = value


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """For tests that only store under keys of their own."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """For tests that kill or freeze it."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture(
    params=[
        "filesystem",
        pytest.param("redis", marks=NEEDS_REDIS),
        pytest.param("redis over a unix socket", marks=NEEDS_REDIS),
        "simulated",
    ]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "filesystem":
        return Directory(tmp_path / "cache")
    if request.param == "simulated":
        return Simulated()
    server: RedisServer = request.getfixturevalue("shared_redis")
    return Redis(server, server.url if request.param == "redis" else f"unix://{server.socket_path}")
