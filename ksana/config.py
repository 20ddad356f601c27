"""All settings, once: each field of `Settings` is a flag, a YAML key and an environment variable.

`max_model_len` is `--max-model-len`, `max_model_len:` in the file, and `KSANA_MAX_MODEL_LEN`.
Which wins: flag, then environment, then file, then the default here. See `ksana.cli.settings` for the
reading; this module only says what exists, with its unit, its default and its bounds.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ksana.errors import ConfigError
from ksana.input_file import read_input

Positive = Annotated[int, Meta(ge=1)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine and its server are started with."""

    # The model
    model: Annotated[
        str,
        Meta(description="Directory, .gguf file, demo name (smollm2-135m), or org/name[@revision][:QUANT]"),
    ]
    served_model_name: Annotated[
        str | None, Meta(description="Name clients use; default: the last part of the model's name")
    ] = None
    dtype: Annotated[
        Literal["auto", "float32"], Meta(description="Arithmetic and KV type; auto is float32 on a CPU")
    ] = "auto"
    device: Annotated[Literal["auto", "cpu"], Meta(description="Where steps run")] = "auto"
    max_model_len: Annotated[
        Positive | None,
        Meta(description="Longest prompt plus output, tokens; default: what the model was made for"),
    ] = None
    chat_template: Annotated[
        str | None, Meta(description="File with a Jinja chat template to use instead of the model's")
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
        Meta(
            description="Store of KV blocks shared by engines: file:///directory, redis://host:port/db or unix:///socket"
        ),
    ] = None
    remote_cache_staging: Annotated[
        Positive, Meta(description="Memory that blocks pass through on their way, such as 64MiB")
    ] = 64 << 20
    remote_cache_max_bytes: Annotated[
        Positive, Meta(description="What a file store may hold before its oldest blocks go, such as 10GiB")
    ] = 10 << 30
    max_remote_loads: Annotated[
        int, Meta(ge=1, le=256, description="Requests whose prefixes are loaded at the same time")
    ] = 4
    remote_cache_timeout: Annotated[
        Positive, Meta(description="Seconds one load may take; then the rest is computed")
    ] = 5
    remote_write_back: Annotated[
        bool, Meta(description="Save computed blocks to the remote cache, in the background")
    ] = True

    # Journal
    journal: Annotated[
        str | None,
        Meta(description="Directory to record all decisions in, for `ksana replay`; prompts are in it"),
    ] = None
    journal_redact: Annotated[
        bool, Meta(description="Leave text out of the journal and rename all token ids")
    ] = False
    journal_key_file: Annotated[
        str | None,
        Meta(
            description="File with the key for --journal-redact, made if it is not there; default: a key "
            "that nobody learns"
        ),
    ] = None
    journal_actors: Annotated[
        tuple[str, ...], Meta(description="Actors to record, comma separated; default: all that decide")
    ] = ()
    journal_segment_bytes: Annotated[
        int, Meta(ge=1 << 12, le=1 << 40, description="Size at which the next file is begun, such as 64MiB")
    ] = 64 << 20
    journal_max_bytes: Annotated[
        Positive, Meta(description="Size of all files together, the oldest of which go first, such as 1GiB")
    ] = 1 << 30

    # Device
    num_threads: Annotated[
        Positive | None, Meta(description="Threads for computing; default: the physical cores")
    ] = None
    worker_start_timeout: Annotated[
        int, Meta(ge=1, description="Seconds a worker may take to load the model")
    ] = 1800

    # Serving
    host: Annotated[str, Meta(description="Address to listen on; 0.0.0.0 for all")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 picks a free one")] = 8000
    api_key: Annotated[
        str | None,
        Meta(
            description="Bearer token that every route but /health and /ready asks for; "
            "a command line is seen by others on the machine, so prefer KSANA_API_KEY or --api-key-file"
        ),
    ] = None
    api_key_file: Annotated[str | None, Meta(description="File that holds the API key, one per line")] = None
    allowed_origins: Annotated[
        tuple[str, ...], Meta(description="Origins for CORS, comma separated; * for all")
    ] = ()
    max_body_bytes: Annotated[Positive, Meta(description="Largest request body, such as 8MiB")] = 8 << 20
    request_timeout: Annotated[Positive, Meta(description="Seconds until a request fails with 504")] = 3600
    drain_timeout: Annotated[int, Meta(ge=0, description="Seconds running requests get after SIGTERM")] = 30
    stall_timeout: Annotated[
        Positive,
        Meta(
            description="Seconds without progress, with work to do, until /health fails; "
            "after twice as many the worker is replaced"
        ),
    ] = 120
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="What is worth a line on stderr")
    ] = "info"

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


def without_password(url: str) -> str:
    """The URL as it may be shown: `redis://...@host:6379/0`."""
    return url if url.startswith("file:") else re.sub(r"(?<=//).*@", "...@", url)


_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_BYTES = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,6}))? ?(?:([kmgt])(i?))?b?", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str) -> int:
    """Bytes that `text` stands for: `4096`, `512MiB`, `1.5GiB` (powers of 1024), `2GB` (powers of 1000).

    A bare unit letter (`2G`) is a power of 1024, as for most programs with a memory option. A fraction
    of a byte is dropped. Raises ValueError that says what is accepted.
    """
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text[:40]!r} is not a size in bytes, such as 4096, 512MiB or 1.5GiB")
    whole, fraction, unit, binary = match[1], match[2] or "", (match[3] or "").lower(), match[4]
    decimal = unit != "" and not binary and text.strip()[-1] in "bB"
    factor: int = (1000 if decimal else 1024) ** _UNITS[unit]
    return int(whole + fraction) * factor // int(10 ** len(fraction))


def format_bytes(num_bytes: int) -> str:
    """The size for people, in the largest binary unit that keeps it at 1 or more: `1.50 GiB`."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 4)
    size = num_bytes / 1024**power
    return f"{size:.{2 if size < 10 else 1 if size < 100 else 0}f} {' KMGT'[power]}iB"


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
