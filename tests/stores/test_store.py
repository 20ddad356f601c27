from __future__ import annotations

from pathlib import Path

import pytest

from ksana.errors import ConfigError
from ksana.stores.filesystem import FilesystemStore
from ksana.stores.redis import RedisStore
from ksana.stores.redis_address import RedisAddress
from ksana.stores.store import open_store


def test_a_directory_is_made(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/a%20cache/b", max_bytes=None)
    assert isinstance(store, FilesystemStore)
    assert (tmp_path / "a cache" / "b").is_dir()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://cache.example", RedisAddress(host="cache.example")),
        ("redis://10.0.0.7:7000/3", RedisAddress(host="10.0.0.7", port=7000, db=3)),
        ("redis://[::1]:7000/", RedisAddress(host="::1", port=7000)),
        ("redis://:s%40f%2Fe@h", RedisAddress(host="h", password="s@f/e")),
        ("redis://me:secret@h:1/15", RedisAddress(host="h", port=1, db=15, user="me", password="secret")),
        ("unix:///run/redis.sock", RedisAddress(socket_path="/run/redis.sock")),
        ("unix://:pw@/run/redis.sock?db=2", RedisAddress(socket_path="/run/redis.sock", db=2, password="pw")),
    ],
)
def test_redis_addresses(url: str, expected: RedisAddress) -> None:
    assert RedisAddress.from_url(url) == expected
    assert isinstance(open_store(url, max_bytes=1), RedisStore)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "redis",
        "/tmp/cache",
        "file://relative/path",
        "file:relative",
        "file://",
        "file:///tmp/x?y",
        "file:///tmp/%00",
        "http://h",
        "rediss://h",
        "redis://",
        "redis://:hunter2@",
        "redis://h:0",
        "redis://h:hunter2",
        "redis://h:99999",
        "redis://h/hunter2",
        "redis://h/65536",
        "redis://h/-1",
        "redis://h/\u0663",
        "redis://h/1/2",
        "redis://hunter2@h",
        "redis://h?db=1",
        "redis://h#hunter2",
        "redis://[::1",
        "unix://host/run/redis.sock",
        "unix:///run/redis.sock?db=x",
        "unix:///run/redis.sock?timeout=1",
        "unix://",
    ],
)
def test_what_is_no_store_is_a_config_error_that_repeats_no_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url, max_bytes=None)
    assert "hunter2" not in str(caught.value)


def test_no_text_of_an_address_has_the_password() -> None:
    address = RedisAddress.from_url("redis://someone:hunter2@h:7/1")
    assert "hunter2" not in f"{address!r} {address} {address.__dict__.keys()}"
    assert str(address) == "h:7"
    assert str(RedisAddress(host="::1")) == "[::1]:6379"
    assert str(RedisAddress(socket_path="/run/redis.sock")) == "/run/redis.sock"
