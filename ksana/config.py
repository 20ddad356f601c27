"""All settings, once: each field of `Settings` is a flag, a YAML key and an environment variable.

`max_model_len` is `--max-model-len`, `max_model_len:` in the file, and `KSANA_MAX_MODEL_LEN`.
Which wins: flag, then environment, then file, then the default here. See `ksana.cli.settings` for the
reading. This module says what exists, with its unit, its default and what it may be; no `Settings` can be
made with anything else, whoever makes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ksana import setting_texts as texts
from ksana.byte_sizes import MAX_BYTES
from ksana.byte_sizes import format_bytes as format_bytes
from ksana.byte_sizes import parse_bytes as parse_bytes
from ksana.errors import ConfigError
from ksana.input_file import read_input
from ksana.setting_fields import nearest, settings_fields

Seconds = Annotated[int, Meta(ge=1, le=366 * 24 * 3600)]
"""A year is as good as for ever."""
Bytes = Annotated[int, Meta(ge=1, le=MAX_BYTES)]


def _text(rule: texts.TextRule) -> Meta:
    return Meta(extra={"rule": rule})


RecordedActor = Literal[
    "tokenizer", "scheduler", "block_allocator", "swa_cache_manager", "remote_cache_loader"
]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine and its server are started with.

    Raises ConfigError, with name, value and what is allowed, for a value that will not do, and for two that
    contradict each other. Sizes may be texts such as "2GiB", and paths `os.PathLike`.
    """

    # The model
    model: Annotated[
        str,
        _text(texts.MODEL),
        Meta(description="Directory, .gguf file, demo name (smollm2-135m), or org/name[@revision][:QUANT]"),
    ]
    served_model_name: Annotated[
        str | None,
        _text(texts.NAME),
        Meta(description="Name clients use; default: the last part of the model's name"),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32"], Meta(description="Arithmetic and KV type; auto is float32 on a CPU")
    ] = "auto"
    device: Annotated[Literal["auto", "cpu"], Meta(description="Where steps run")] = "auto"
    max_model_len: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 30)] | None,
        Meta(description="Longest prompt plus output, tokens; default: what the model was made for"),
    ] = None
    chat_template: Annotated[
        str | None,
        _text(texts.PATH),
        Meta(description="File with a Jinja chat template to use instead of the model's"),
    ] = None

    # Batching
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096, description="Requests in one step at most")] = 64
    max_num_batched_tokens: Annotated[
        int, Meta(ge=1, le=1 << 20, description="Tokens in one step at most")
    ] = 512
    max_queued_requests: Annotated[
        int,
        Meta(ge=0, le=1 << 20, description="Requests waiting beyond max-num-seqs before new ones get 429"),
    ] = 256
    plan_ahead: Annotated[bool, Meta(description="Plan the next step while one runs")] = True

    # KV cache
    block_size: Annotated[Literal[8, 16, 32, 64, 128], Meta(description="Tokens in a KV block")] = 16
    kv_cache_memory: Annotated[
        str | None,
        _text(texts.SIZE),
        Meta(description="KV pool, such as 2GiB; default: the smaller of 4 GiB and a quarter of free memory"),
    ] = None
    enable_prefix_caching: Annotated[bool, Meta(description="Reuse KV of equal prefixes")] = True
    window_open_at_start: Annotated[
        bool,
        Meta(description="Prefixes shorter than the sliding window may be reused from their first block on"),
    ] = True
    swa_eviction: Annotated[
        Literal["lfu", "lru", "lfu-aged"], Meta(description="Which sliding-window block is evicted first")
    ] = "lfu"

    # Remote cache
    remote_cache: Annotated[
        str | None,
        _text(texts.STORE),
        Meta(
            description="Store of KV blocks shared by engines: file:///directory, redis://host:port/db or unix:///socket"
        ),
    ] = None
    remote_cache_staging: Annotated[
        Bytes, Meta(description="Memory that blocks pass through on their way, such as 64MiB")
    ] = 64 << 20
    remote_cache_max_bytes: Annotated[
        Bytes, Meta(description="What a file store may hold before its oldest blocks go, such as 10GiB")
    ] = 10 << 30
    max_remote_loads: Annotated[
        int, Meta(ge=1, le=256, description="Requests whose prefixes are loaded at the same time")
    ] = 4
    remote_cache_timeout: Annotated[
        Seconds, Meta(description="Seconds one load may take; then the rest is computed")
    ] = 5
    remote_write_back: Annotated[
        bool, Meta(description="Save computed blocks to the remote cache, in the background")
    ] = True

    # Journal
    journal: Annotated[
        str | None,
        _text(texts.PATH),
        Meta(description="Directory to record all decisions in, for `ksana replay`; prompts are in it"),
    ] = None
    journal_redact: Annotated[
        bool, Meta(description="Leave text out of the journal and rename all token ids")
    ] = False
    journal_key_file: Annotated[
        str | None,
        _text(texts.PATH),
        Meta(
            description="File with the key for --journal-redact, made if it is not there; default: a key "
            "that nobody learns"
        ),
    ] = None
    journal_actors: Annotated[
        tuple[RecordedActor, ...],
        Meta(description="Actors to record, comma separated; default: all that decide"),
    ] = ()
    journal_segment_bytes: Annotated[
        int, Meta(ge=1 << 12, le=1 << 40, description="Size at which the next file is begun, such as 64MiB")
    ] = 64 << 20
    journal_max_bytes: Annotated[
        Bytes, Meta(description="Size of all files together, the oldest of which go first, such as 1GiB")
    ] = 1 << 30

    # Device
    num_threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(description="Threads for computing; default: the physical cores"),
    ] = None
    worker_start_timeout: Annotated[
        Seconds, Meta(description="Seconds a worker may take to load the model")
    ] = 1800

    # Serving
    host: Annotated[str, _text(texts.HOST), Meta(description="Address to listen on; 0.0.0.0 for all")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 picks a free one")] = 8000
    api_key: Annotated[
        str | None,
        _text(texts.KEY),
        Meta(
            description="Bearer token that every route but /health and /ready asks for; "
            "a command line is seen by others on the machine, so prefer KSANA_API_KEY or --api-key-file"
        ),
    ] = None
    api_key_file: Annotated[
        str | None, _text(texts.PATH), Meta(description="File that holds the API key, one per line")
    ] = None
    allowed_origins: Annotated[
        tuple[Annotated[str, _text(texts.ORIGIN)], ...],
        Meta(description="Origins for CORS, comma separated; * for all"),
    ] = ()
    max_body_bytes: Annotated[Bytes, Meta(description="Largest request body, such as 8MiB")] = 8 << 20
    request_timeout: Annotated[Seconds, Meta(description="Seconds until a request fails with 504")] = 3600
    drain_timeout: Annotated[
        int, Meta(ge=0, le=366 * 24 * 3600, description="Seconds running requests get after SIGTERM")
    ] = 30
    stall_timeout: Annotated[
        Seconds,
        Meta(
            description="Seconds without progress, with work to do, until /health fails; "
            "after twice as many the worker is replaced"
        ),
    ] = 120
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="What is worth a line on stderr")
    ] = "info"

    def __post_init__(self) -> None:
        for field in FIELDS:
            value = getattr(self, field.name)
            checked = field.check(value, field.name, is_text=False)
            if checked is not value:
                msgspec.structs.force_setattr(self, field.name, checked)
        _refuse_contradictions(self)

    def __repr__(self) -> str:
        """As for any struct, but without secrets: settings end up in logs and tracebacks."""
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        hidden = (
            (name, "..." if name in SECRET_FIELDS and value is not None else repr(value))
            for name, value in values
        )
        return f"Settings({', '.join(f'{name}={text}' for name, text in hidden)})"


GROUPS = {
    "model": "The model",
    "max_num_seqs": "Batching",
    "block_size": "KV cache",
    "remote_cache": "Remote cache",
    "journal": "Journal",
    "num_threads": "Computing",
    "host": "Serving",
}
"""First field of each group, and what `--help` calls the group."""

SECRET_FIELDS = frozenset({"api_key", "remote_cache"})
"""Never printed or logged as they are (the URL of a store may hold a password)."""

BYTE_FIELDS = frozenset(
    {
        "kv_cache_memory",
        "max_body_bytes",
        "remote_cache_staging",
        "remote_cache_max_bytes",
        "journal_segment_bytes",
        "journal_max_bytes",
    }
)
"""Settings that may be written as `2GiB`; see `parse_bytes`."""

NOT_SETTINGS = frozenset({"KSANA_KERNELS", "KSANA_TEST_STRICT"})
"""KSANA_ variables that are not settings of a server: how kernels are built, how tests treat skips."""

MAX_KEY_FILE_BYTES = 64 << 10

FIELDS = settings_fields(Settings, groups=GROUPS, secrets=SECRET_FIELDS, byte_sizes=BYTE_FIELDS)

_MIN_SEGMENTS = 2
"""Of a journal: the newest may have just begun."""


def settings_from(values: Mapping[str, Any]) -> Settings:
    """The settings with these values. Raises ConfigError for them, and for a name that no setting has."""
    names = [field.name for field in FIELDS]
    for name in values:
        if name not in names:
            raise ConfigError(f"no setting is called {name[:80]!r}{nearest(name, names)}")
    if "model" not in values:
        raise ConfigError("no model was given")
    return Settings(**values)


def _refuse_contradictions(settings: Settings) -> None:
    """What each setting allows by itself, but not together. Raises ConfigError."""
    if settings.remote_cache is not None and not settings.enable_prefix_caching:
        raise ConfigError("remote_cache needs prefix caching: leave out --no-enable-prefix-caching")
    if settings.journal is None:
        for name in ("journal_redact", "journal_key_file", "journal_actors"):
            if getattr(settings, name):
                raise ConfigError(f"{name} is set, but nothing is recorded: name a directory with journal")
        return
    if settings.journal_key_file is not None and not settings.journal_redact:
        raise ConfigError("journal_key_file is set, but nothing is redacted: set journal_redact")
    if "tokenizer" in settings.journal_actors and settings.journal_redact:
        raise ConfigError("journal_actors: the tokenizer hears and says text, so it goes unrecorded")
    if settings.journal_max_bytes < _MIN_SEGMENTS * settings.journal_segment_bytes:
        raise ConfigError(
            f"journal_max_bytes is {settings.journal_max_bytes}: it must hold {_MIN_SEGMENTS} segments of "
            f"{settings.journal_segment_bytes} bytes (journal_segment_bytes)"
        )


def without_password(url: str) -> str:
    """The URL as it may be shown: `redis://...@host:6379/0`."""
    return url if url.startswith("file:") else re.sub(r"(?<=//).*@", "...@", url)


def read_api_keys(settings: Settings) -> tuple[str, ...]:
    """The keys a client may show: `api_key` and the lines of `api_key_file`. Empty: no key is asked for.

    Raises ConfigError for a file that cannot be read, holds no key, or a key no HTTP header can carry.
    A key never appears in the text of an error.
    """
    keys = [] if settings.api_key is None else [settings.api_key]
    if settings.api_key_file is not None:
        path = Path(settings.api_key_file)
        raw = read_input(path, MAX_KEY_FILE_BYTES, f"API key file {path}")
        try:
            lines = [line.strip() for line in raw.decode("utf-8").splitlines()]
        except UnicodeDecodeError:
            raise ConfigError(f"API key file {path} is not text") from None
        if not any(lines):
            raise ConfigError(f"API key file {path} holds no key; put one on a line")
        keys += [line for line in lines if line]
    for key in keys:
        if not key or not all("!" <= letter <= "~" for letter in key):
            raise ConfigError("an API key is empty or has spaces or letters that a header cannot carry")
    return tuple(dict.fromkeys(keys))
