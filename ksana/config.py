"""All settings, once: each field of `Settings` is a flag, a YAML key and an environment variable.

`max_model_len` is `--max-model-len`, `max_model_len:` in the file, and `KSANA_MAX_MODEL_LEN`.
Which wins: flag, then environment, then file, then the default here. See `ksana.cli.settings` for the
reading; this module only says what exists, with its unit, its default and its bounds.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

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
    generation_config: Annotated[
        Literal["ignore", "model"],
        Meta(
            description="Whether the model's generation_config.json changes sampling defaults; logged at start"
        ),
    ] = "ignore"

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
        Literal["lfu", "lru"], Meta(description="Which sliding-window block is evicted first")
    ] = "lfu"

    # Device
    num_threads: Annotated[
        Positive | None, Meta(description="Threads for computing; default: the physical cores")
    ] = None
    worker_start_timeout: Annotated[
        int, Meta(ge=1, description="Seconds a worker may take to load the model")
    ] = 1800

    # Serving
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="0 picks a free one")] = 8000
    api_key: Annotated[
        str | None, Meta(description="Bearer token that every route but /health and /ready asks for")
    ] = None
    api_key_file: Annotated[str | None, Meta(description="File that holds the API key, one per line")] = None
    allowed_origins: Annotated[
        tuple[str, ...], Meta(description="Origins for CORS, comma separated; * for all")
    ] = ()
    max_body_bytes: Annotated[Positive, Meta(description="Largest request body")] = 8 << 20
    request_timeout: Annotated[Positive, Meta(description="Seconds until a request fails with 504")] = 3600
    drain_timeout: Annotated[int, Meta(ge=0, description="Seconds running requests get after SIGTERM")] = 30
    stall_timeout: Annotated[
        Positive, Meta(description="Seconds without progress, with work to do, until /health fails")
    ] = 120
    log_level: Literal["debug", "info", "warning", "error"] = "info"


SECRET_FIELDS = frozenset({"api_key"})
"""Never printed or logged."""
