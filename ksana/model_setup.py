"""From settings to everything an engine must know of its model before a worker exists. No torch.

Blocking: files are read, and fetched if need be. `ksana.engine` does it in a thread.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ksana.cache.cache_config import CacheConfig
from ksana.cache.pool_sizes import PoolSizes, plan_pools
from ksana.config import Settings, format_bytes, parse_bytes
from ksana.devices.backend import WorkerInfo, WorkerSettings
from ksana.devices.staging import StagingMemory, plan_slots
from ksana.errors import ConfigError
from ksana.host_memory import available_memory_bytes
from ksana.input_file import read_input
from ksana.loading.settings import LoaderSettings
from ksana.messages.status import ModelInfo
from ksana.models.load import fingerprint, full_fingerprint, read_spec
from ksana.models.sources import resolve_model
from ksana.models.spec import ModelSpec
from ksana.scheduling.settings import SchedulerSettings
from ksana.shown import shown_path
from ksana.stores.store import store_place
from ksana.tokenizers import Tokenizer, load_tokenizer
from ksana.tokenizers.template_limits import MAX_TEMPLATE_BYTES

MAX_DEFAULT_KV_BYTES = 4 << 30
_FLOAT32_BYTES = 4
KV_FORMAT = 1
"""Of blocks in a store. To be raised whenever their bytes mean something else."""

Report = Callable[[str], None]
"""Told in words what takes time, such as that a model is being fetched."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model as found: what it is, where, and how it reads and writes."""

    path: Path
    fingerprint: str
    spec: ModelSpec
    tokenizer: Tokenizer
    full_fingerprint: str | None = None
    """Over every byte of the weights; there when KV is shared through a remote cache."""


def find_model(settings: Settings, report: Report) -> ModelFiles:
    """Resolve, read and check a model, but for its weights.

    Raises ModelLoadError or ConfigError (a chat template that cannot be read, a store that there cannot be).
    """
    if settings.remote_cache is not None:
        store_place(settings.remote_cache)  # told before weights are read
    chat_template = read_chat_template(settings.chat_template)
    path = resolve_model(settings.model, progress=report)
    spec = read_spec(path)
    return ModelFiles(
        path=path,
        fingerprint=fingerprint(path),
        spec=spec,
        tokenizer=load_tokenizer(path, chat_template, spec.vocab_size),
        full_fingerprint=None if settings.remote_cache is None else full_fingerprint(path),
    )


def read_chat_template(file: str | None) -> str | None:
    """The text of the template file. Raises ConfigError when it cannot be read."""
    if file is None:
        return None
    name = f"the chat template {shown_path(file)}"
    try:
        return read_input(Path(file), MAX_TEMPLATE_BYTES, name).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} cannot be read: byte {error.start} is not UTF-8") from None


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """Limits and pools of one engine; what each part is started with."""

    settings: Settings
    files: ModelFiles
    max_model_len: int
    pools: PoolSizes
    staging: StagingMemory | None = None
    """Memory shared with the worker, if there is a remote cache."""

    @property
    def plan_ahead(self) -> bool:
        return self.settings.plan_ahead and self.pools.plan_ahead_possible

    def cache_config(self) -> CacheConfig:
        settings, spec = self.settings, self.files.spec
        return CacheConfig(
            block_size=self.pools.block_size,
            num_fa_blocks=self.pools.num_fa_blocks,
            num_swa_blocks=self.pools.num_swa_blocks,
            sliding_window=spec.sliding_window if spec.num_sliding_layers else None,
            enable_prefix_caching=settings.enable_prefix_caching,
            window_open_at_start=settings.window_open_at_start,
            swa_eviction=settings.swa_eviction,
            plan_ahead=self.plan_ahead,
            write_back=self.staging is not None and settings.remote_write_back,
            chain_identity=self.kv_identity(),
        )

    def kv_identity(self) -> bytes:
        """What the bytes of a stored block depend on besides tokens and salt, as a hash."""
        spec = self.files.spec
        parts = {
            "format": KV_FORMAT,
            "model": self.files.full_fingerprint or self.files.fingerprint,
            "dtype": "float32",
            "block_size": self.pools.block_size,
            "layers": spec.layer_kinds,
            "kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "window": spec.sliding_window,
            "parallel": "1/1",
        }
        return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).digest()

    def staging_plan(self) -> tuple[int, int]:
        """(slots, bytes in each) of staging memory. Raises ConfigError if it is too small."""
        pools = self.pools
        return plan_slots(self.settings.remote_cache_staging, pools.fa_block_bytes, pools.swa_block_bytes)

    def loader_settings(self, num_slots: int) -> LoaderSettings:
        config = self.cache_config()
        load_s = float(self.settings.remote_cache_timeout)
        return LoaderSettings(
            identity=config.chain_identity,
            block_size=config.block_size,
            fa_block_bytes=self.pools.fa_block_bytes,
            swa_block_bytes=self.pools.swa_block_bytes,
            window_blocks=config.window_blocks if config.has_swa else 0,
            window_open_at_start=config.window_open_at_start,
            num_slots=num_slots,
            # A store that may take longer over a load may take longer over each part of it.
            find_timeout_s=max(1.0, load_s / 5),
            fetch_timeout_s=max(2.0, load_s * 2 / 5),
            save_timeout_s=max(10.0, load_s * 2),
            write_back=self.settings.remote_write_back,
        )

    def scheduler_settings(self) -> SchedulerSettings:
        return SchedulerSettings(
            max_num_seqs=self.settings.max_num_seqs,
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            block_size=self.pools.block_size,
            plan_ahead=self.plan_ahead,
            sliding_window=self.cache_config().sliding_window,
            max_remote_loads=self.settings.max_remote_loads if self.staging is not None else 0,
            remote_load_timeout_s=float(self.settings.remote_cache_timeout),
        )

    def worker_settings(self) -> WorkerSettings:
        return WorkerSettings(
            model_path=str(self.files.path),
            num_fa_blocks=self.pools.num_fa_blocks,
            num_swa_blocks=self.pools.num_swa_blocks,
            block_size=self.pools.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.settings.max_num_seqs,
            num_threads=self.settings.num_threads,
            staging=self.staging.area if self.staging is not None else None,
        )

    def model_info(self, worker: WorkerInfo) -> ModelInfo:
        spec = self.files.spec
        return ModelInfo(
            name=self.settings.served_model_name or model_name(self.settings.model),
            path=str(self.files.path),
            fingerprint=self.files.fingerprint,
            family=spec.family,
            dtype=worker.dtype,
            vocab_size=spec.vocab_size,
            max_model_len=self.max_model_len,
            block_size=self.pools.block_size,
            num_fa_blocks=self.pools.num_fa_blocks,
            num_swa_blocks=self.pools.num_swa_blocks,
            kv_cache_bytes=self.pools.kv_bytes,
            sliding_window=spec.sliding_window,
            device=worker.device,
            eos_token_ids=self.files.tokenizer.eos_ids,
        )


def set_up(settings: Settings, files: ModelFiles) -> ModelSetup:
    """Decide on lengths and pool sizes. Raises ConfigError, with the numbers, when they do not fit."""
    spec = files.spec
    max_model_len = settings.max_model_len or spec.max_position
    if max_model_len > spec.max_position:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but {settings.model} was made for "
            f"{spec.max_position} tokens at most"
        )
    available_bytes = available_memory_bytes()
    if settings.remote_cache is not None:
        refuse_more_than_there_is("remote_cache_staging", settings.remote_cache_staging, available_bytes)
    pools = plan_pools(
        kv_bytes=decide_kv_bytes(settings.kv_cache_memory, available_bytes),
        full_bytes_per_token=spec.kv_bytes_per_token("full", _FLOAT32_BYTES),
        sliding_bytes_per_token=spec.kv_bytes_per_token("sliding", _FLOAT32_BYTES),
        sliding_window=spec.sliding_window if spec.num_sliding_layers else None,
        block_size=settings.block_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
    )
    return ModelSetup(settings, files, max_model_len, pools)


def model_name(model: str) -> str:
    """What clients call a model unless told otherwise: the last part of its name.

    `org/name@main:Q4_K_M` is `name`, `/models/name.gguf` is `name`.
    """
    last = Path(model).name or model
    if not Path(model).exists():
        last = re.split("[@:]", last)[0] or last
    return last.removesuffix(".gguf")


def decide_kv_bytes(asked: str | None, available_bytes: int | None) -> int:
    """Memory of the KV pools: what is asked for, else the smaller of 4 GiB and a quarter of what is free.

    `available_bytes` could be had now; None where the system does not tell. Raises ConfigError for what is
    no size, for more than there is, and where neither says anything.
    """
    if asked is None:
        if available_bytes is None:
            raise ConfigError("this system does not tell how much memory is free: give --kv-cache-memory")
        return min(MAX_DEFAULT_KV_BYTES, available_bytes // 4)
    try:
        kv_bytes = parse_bytes(asked)
    except ValueError as error:
        raise ConfigError(f"kv_cache_memory: {error}") from None
    refuse_more_than_there_is("kv_cache_memory", kv_bytes, available_bytes)
    return kv_bytes


def refuse_more_than_there_is(setting: str, num_bytes: int, available_bytes: int | None) -> None:
    """Raises ConfigError, with both numbers, before a worker fails with less clear words, or is killed."""
    if available_bytes is not None and num_bytes > available_bytes:
        raise ConfigError(
            f"{setting} asks for {format_bytes(num_bytes)}, but only {format_bytes(available_bytes)} "
            "of memory are free here"
        )
