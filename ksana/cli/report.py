"""What `ksana serve` says: the block at the start, the bar while loading, the line while there is work.

Pure: numbers in, text out.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable

from ksana.config import Settings, format_bytes, without_password
from ksana.messages.blocks import PoolUse
from ksana.messages.status import EngineStatus, ModelInfo

SAMPLING_POLICY = "defaults of the API; the model's generation_config.json changes nothing"


def rows(title: str, pairs: Iterable[tuple[str, str]]) -> str:
    """A title and lines of name and text, the texts aligned."""
    pairs = list(pairs)
    width = max(len(name) for name, _ in pairs)
    return "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in pairs)])


def start_block(
    version: str, model: ModelInfo, settings: Settings, address: str, command: str = "ksana"
) -> str:
    """What is served, with what, where, and how to try it.

    `version` is Ksana's, `address` a URL without a slash at its end, `command` how a shell finds `ksana`.
    """
    asks_for_key = settings.api_key is not None or settings.api_key_file is not None
    return rows(
        f"Ksana {version} serves {model.name}",
        [
            ("model", f"{model.path} ({model.family}, {model.vocab_size} tokens known)"),
            ("computing", f"{model.dtype}, {model.device}"),
            ("KV pool", pool_text(model)),
            *remote_cache_rows(settings),
            *journal_rows(settings),
            ("limits", limits_text(model.max_model_len, settings)),
            ("sampling", SAMPLING_POLICY),
            ("address", f"{address} ({'API key asked for' if asks_for_key else 'no API key'})"),
            ("try", curl_line(model.name, address, asks_for_key)),
            ("or", chat_line(address, command)),
        ],
    )


def pool_text(model: ModelInfo) -> str:
    num_tokens = model.num_fa_blocks * model.block_size
    text = f"{format_bytes(model.kv_cache_bytes)}: {model.num_fa_blocks} blocks of {model.block_size} tokens"
    if model.num_swa_blocks:
        text += f", and {model.num_swa_blocks} for layers with a window of {model.sliding_window} tokens"
    return f"{text} (room for {num_tokens} tokens)"


def remote_cache_rows(settings: Settings) -> list[tuple[str, str]]:
    if settings.remote_cache is None:
        return []
    saving = "computed blocks are saved" if settings.remote_write_back else "nothing is saved"
    staging = format_bytes(settings.remote_cache_staging)
    return [
        ("remote cache", f"{without_password(settings.remote_cache)}, {staging} of staging memory, {saving}")
    ]


def journal_rows(settings: Settings) -> list[tuple[str, str]]:
    if settings.journal is None:
        return []
    content = (
        "without text, token ids renamed" if settings.journal_redact else "prompts and answers are in it"
    )
    return [("journal", f"{settings.journal}, {format_bytes(settings.journal_max_bytes)} at most; {content}")]


def limits_text(max_model_len: int, settings: Settings) -> str:
    return (
        f"{max_model_len} tokens per request, {settings.max_num_seqs} requests and "
        f"{settings.max_num_batched_tokens} tokens per step, {settings.max_queued_requests} more may wait"
    )


def curl_line(model: str, address: str, asks_for_key: bool) -> str:
    """A command to paste into a shell."""
    messages = [{"role": "user", "content": "Name three rivers."}]
    body = json.dumps({"model": model, "messages": messages, "temperature": 0})
    key = ' -H "Authorization: Bearer $KSANA_API_KEY"' if asks_for_key else ""
    header = "-H 'Content-Type: application/json'"
    return f"curl {address}/v1/chat/completions {header}{key} -d {shlex.quote(body)}"


def chat_line(address: str, command: str) -> str:
    return f"{command} chat" if address == "http://127.0.0.1:8000" else f"{command} chat --url {address}"


def url_of(host: str, port: int) -> str:
    """Where a client on this machine reaches a server that listens on `host`."""
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1" if host != "::" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def progress_bar(done: int, total: int, width: int = 30) -> str:
    """`[###############---------------]  50%` of whatever is counted."""
    share = 1.0 if total <= 0 else min(max(done / total, 0.0), 1.0)
    filled = int(share * width)
    return f"[{'#' * filled}{'-' * (width - filled)}] {share:4.0%}"


def work_line(before: EngineStatus, now: EngineStatus) -> str | None:
    """Throughput since `before`, and the state now; None when there was and is nothing to do.

    `out` are tokens of answers. `through the model` are all that were computed, of prompts and of answers:
    it moves with every step, also in the middle of a long prompt, when nothing comes out yet.
    """
    num_computed = now.counters.num_computed_tokens - before.counters.num_computed_tokens
    num_out = now.counters.num_output_tokens - before.counters.num_output_tokens
    if not (num_computed or num_out or now.has_work or before.has_work):
        return None
    period_s = max(now.now_s - before.now_s, 1e-9)
    parts = [
        f"{num_out / period_s:.1f} tokens/s out",
        f"{num_computed / period_s:.1f} through the model",
        f"{now.num_running} running",
        f"{now.num_waiting} waiting",
        *(f"{name} {_use(use)}" for name, use in (("KV", now.fa_use), ("window KV", now.swa_use)) if use),
    ]
    if num_preempted := now.counters.num_preemptions - before.counters.num_preemptions:
        parts.append(f"{num_preempted} preempted")
    if now.remote is not None:
        if num_remote := now.cache.num_remote_hit_tokens - before.cache.num_remote_hit_tokens:
            parts.append(f"{num_remote} tokens from the remote cache")
        if not now.remote.store_ok:
            parts.append("remote cache down")
        elif not now.remote.saves_ok:
            parts.append("remote cache takes no blocks")
    return ", ".join(parts)


def _use(use: PoolUse) -> str:
    """Blocks that somebody needs, as a share of the pool; what is only cached can be had at any time."""
    needed = use.num_referenced + use.num_deferred + use.num_held
    return f"{needed / max(use.num_blocks, 1):.0%}"
