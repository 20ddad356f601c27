"""Settings themselves: sizes, keys, and that the tables beside the struct name fields of it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana.config import (
    BYTE_FIELDS,
    GROUPS,
    MAX_KEY_FILE_BYTES,
    SECRET_FIELDS,
    Settings,
    format_bytes,
    parse_bytes,
    read_api_keys,
    without_password,
)
from ksana.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("5b", 5),
        ("2GiB", 2 << 30),
        ("2GB", 2_000_000_000),
        ("2G", 2 << 30),
        ("2kB", 2000),
        ("1.5gib", 3 << 29),
        ("0.5KiB", 512),
        (" 10 MB ", 10_000_000),
        ("1TiB", 1 << 40),
    ],
)
def test_parse_bytes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "5iB", "1e3", "2 Gibs", "1.GiB", ".5G", "1_000", "１GiB", "1GiB2", "9" * 40]
)
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size in bytes"):
        parse_bytes(text)


def test_a_refused_size_is_not_repeated_at_length() -> None:
    with pytest.raises(ValueError) as error:
        parse_bytes("x" * 1_000_000)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 << 29, "1.50 GiB"), (25 << 20, "25.0 MiB")],
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(0, 1 << 50))
def test_what_is_shown_reads_back_as_nearly_the_same(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.01)


def test_the_tables_name_fields() -> None:
    names = {field.name for field in msgspec.structs.fields(Settings)}
    assert set(GROUPS) <= names
    assert names >= SECRET_FIELDS
    assert names >= BYTE_FIELDS
    assert next(iter(GROUPS)) == msgspec.structs.fields(Settings)[0].name


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@host:6379/0", "redis://...@host:6379/0"),
        ("redis://user:sec/ret@host/0", "redis://...@host/0"),
        ("redis://user:se@cret@host/0", "redis://...@host/0"),
        ("unix://:secret@/run/redis.sock", "unix://...@/run/redis.sock"),
        ("file:///a@b/c", "file:///a@b/c"),
    ],
)
def test_the_password_of_a_store_is_not_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown
    assert "secret" not in repr(Settings(model="m", remote_cache=url))


def test_keys_of_setting_and_file_together(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("first\n\n  second \r\nfirst\n")
    assert read_api_keys(Settings(model="m")) == ()
    assert read_api_keys(Settings(model="m", api_key="zero", api_key_file=str(path))) == (
        "zero",
        "first",
        "second",
    )


@pytest.mark.parametrize(
    "content",
    [b"", b"\n \n", b"\xff\xfe", b"a" * (MAX_KEY_FILE_BYTES + 1), "schl\u00fcssel".encode(), b"two words"],
)
def test_a_file_without_usable_keys(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        read_api_keys(Settings(model="m", api_key_file=str(path)))


def test_a_missing_key_file_is_named() -> None:
    with pytest.raises(ConfigError, match="/nowhere/keys cannot be read"):
        read_api_keys(Settings(model="m", api_key_file="/nowhere/keys"))


def test_a_bad_key_is_not_shown() -> None:
    with pytest.raises(ConfigError) as error:
        read_api_keys(Settings(model="m", api_key="hush hush"))
    assert "hush" not in str(error.value)


def test_settings_in_a_log_or_traceback_show_no_secret() -> None:
    text = repr(Settings(model="m", api_key="hush"))
    assert "hush" not in text
    assert "model='m'" in text
    assert "api_key=None" in repr(Settings(model="m"))
