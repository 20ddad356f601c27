"""What every store can do, and how one is opened from a URL."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol
from urllib.parse import unquote, urlsplit

from ksana.errors import ConfigError
from ksana.stores.filesystem import FilesystemStore
from ksana.stores.redis import RedisStore
from ksana.stores.redis_address import RedisAddress


class Store(Protocol):
    """KV blocks by key. One object serves many tasks at once, in any order.

    Every method may raise RemoteCacheError, and only that: unreachable, refused; `DamagedValue` for what is
    no value of the key and `KeyFault` for what stands in its place, both of which say nothing of the store.
    None has a deadline of its own; callers set one (`trio.move_on_after`) and may cancel at any moment:
    afterwards nobody writes into `into` or reads from `data` any more, and the store goes on working. A
    cancelled `put` may have stored the value or not, never a part of it.
    """

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of the keys there seems to be a value for; whether it is good only `get` says."""
        ...

    async def get(self, key: bytes, into: memoryview) -> bool:
        """Read the value of exactly `len(into)` bytes. False: there is none.

        True: `into` holds it, verified. On RemoteCacheError (also: damaged, of another size, key or format)
        `into` may hold anything.
        """
        ...

    async def put(self, key: bytes, data: memoryview) -> None:
        """Store the value; one that is there already is replaced, and readers see the old or the new one."""
        ...

    async def aclose(self) -> None:
        """Let go of connections. What is stored stays."""
        ...


def open_store(url: str, *, max_bytes: int | None) -> Store:
    """The store at `url`; ConfigError if it cannot be one. Nothing is connected yet.

        file:///absolute/directory         made if it is not there
        redis://[[user]:password@]host[:port][/db]
        unix:///path/to/socket[?db=n]      Redis too; [[user]:password@] may stand before the path

    `max_bytes` caps what a directory holds (None: no cap). Redis has its own `maxmemory`.
    """
    place = store_place(url)
    if isinstance(place, RedisAddress):
        return RedisStore(place)
    return FilesystemStore.open(place, max_bytes=max_bytes)


def store_place(url: str) -> str | RedisAddress:
    """The directory or server that a URL names; ConfigError if it is none of the forms of `open_store`."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"the remote cache's URL cannot be read ({error})") from None
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise ConfigError("a directory as remote cache is written file:///absolute/path")
        directory = unquote(parts.path)
        if not directory.startswith("/") or "\0" in directory:
            raise ConfigError("a directory as remote cache is written file:///absolute/path")
        return directory
    if parts.scheme in ("redis", "unix"):
        return RedisAddress.from_url(url)
    scheme = parts.scheme if re.fullmatch(r"[a-z][a-z0-9+.-]{0,15}", parts.scheme) else ""
    raise ConfigError(f"a remote cache is file:///... or redis://..., not {scheme or 'that'}")
