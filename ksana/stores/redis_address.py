"""Where a Redis or Valkey server is, read from a URL; the password shows in no text."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

from ksana.errors import ConfigError

_FORMS = "redis://[[user]:password@]host[:port][/db] or unix://[[user]:password@]/path/to/socket[?db=n]"
_MAX_DB = 65535


@dataclass(frozen=True)
class RedisAddress:
    host: str = "localhost"
    port: int = 6379
    db: int = 0
    socket_path: str | None = None
    """A unix socket, in place of host and port."""
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    @classmethod
    def from_url(cls, url: str) -> RedisAddress:
        """ConfigError, without quoting the URL, if it is none of the forms that `open_store` names."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise ConfigError(f"the Redis URL cannot be read; it should be {_FORMS}") from None
        user = unquote(parts.username) if parts.username else None
        password = unquote(parts.password) if parts.password is not None else None
        if user and password is None:
            raise ConfigError(f"the Redis URL has a user without a password; it should be {_FORMS}")
        if parts.fragment:
            raise ConfigError(f"the Redis URL ends in #...; it should be {_FORMS} (write # as %23)")
        if parts.scheme == "unix":
            query = parse_qs(parts.query, keep_blank_values=True)
            if (
                host
                or port
                or not parts.path.startswith("/")
                or "\0" in unquote(parts.path)
                or query.keys() - {"db"}
            ):
                raise ConfigError(f"the Redis URL should be {_FORMS}")
            db = _db_number(query.get("db", ["0"])[-1])
            return cls(db=db, socket_path=unquote(parts.path), user=user, password=password)
        if parts.scheme != "redis" or not host or parts.query or port == 0:
            raise ConfigError(f"the Redis URL should be {_FORMS}")
        db = _db_number(parts.path.removeprefix("/") or "0")
        return cls(host=host, port=port or 6379, db=db, user=user, password=password)

    def __str__(self) -> str:
        """For logs and errors."""
        return self.socket_path or (f"[{self.host}]" if ":" in self.host else self.host) + f":{self.port}"


def _db_number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= _MAX_DB):
        raise ConfigError(f"the Redis URL names a database that is no number up to {_MAX_DB}")
    return int(text)
