"""The texts of `ksana serve`."""

from __future__ import annotations

import json
import shlex

import msgspec
import pytest

from ksana.cli.report import curl_line, progress_bar, start_block, url_of, work_line
from ksana.config import Settings
from ksana.messages.blocks import CacheCounters, PoolUse
from ksana.messages.status import EngineStatus, ModelInfo, SchedulerCounters
from ksana.messages.stores import RemoteCacheStatus

MODEL = ModelInfo(
    name="small",
    path="/models/small.gguf",
    fingerprint="f",
    family="llama",
    dtype="float32",
    vocab_size=1000,
    max_model_len=2048,
    block_size=16,
    num_fa_blocks=200,
    num_swa_blocks=0,
    kv_cache_bytes=3 << 29,
    device="native AVX2, 2 threads",
)

IDLE = EngineStatus(
    now_s=100.0,
    last_progress_s=90.0,
    num_open_slots=0,
    num_running=0,
    num_waiting=0,
    fa_use=PoolUse(num_blocks=200, num_free=150, num_cached=50, num_referenced=0, num_deferred=0),
    swa_use=None,
    cache=CacheCounters(),
    counters=SchedulerCounters(num_prompt_tokens=1000, num_computed_tokens=1500, num_output_tokens=500),
    worker_state="ready",
    worker_epoch=1,
)


def after_10_s(**changes: object) -> EngineStatus:
    return msgspec.structs.replace(IDLE, now_s=110.0, **changes)


def test_start_block_says_all_that_is_asked_for() -> None:
    text = start_block("1.0", MODEL, Settings(model="m", max_num_seqs=7), "http://127.0.0.1:8000")
    for part in (
        "Ksana 1.0 serves small",
        "float32, native AVX2, 2 threads",
        "1.50 GiB: 200 blocks of 16 tokens (room for 3200 tokens)",
        "2048 tokens per request, 7 requests and 512 tokens per step, 256 more may wait",
        "generation_config.json changes nothing",
        "http://127.0.0.1:8000 (no API key)",
        "curl http://127.0.0.1:8000/v1/chat/completions",
        "ksana chat",
    ):
        assert part in text


def test_start_block_of_a_model_with_windows() -> None:
    model = msgspec.structs.replace(MODEL, num_swa_blocks=40, sliding_window=512)
    text = start_block("1.0", model, Settings(model="m"), "http://h:1")
    assert "and 40 for layers with a window of 512 tokens" in text
    assert "ksana chat --url http://h:1" in text
    text = start_block("1.0", model, Settings(model="m"), "http://127.0.0.1:8000", ".venv/bin/ksana")
    assert text.endswith("  .venv/bin/ksana chat")


def test_a_key_is_mentioned_but_not_shown() -> None:
    text = start_block("1.0", MODEL, Settings(model="m", api_key="hush"), "http://h:1")
    assert "hush" not in text
    assert "API key asked for" in text
    assert '"Authorization: Bearer $KSANA_API_KEY"' in text


def test_the_curl_line_survives_the_shell() -> None:
    words = shlex.split(curl_line('it\'s "odd" $HOME', "http://h:1", False))
    assert words[:2] == ["curl", "http://h:1/v1/chat/completions"]
    assert json.loads(words[words.index("-d") + 1])["model"] == 'it\'s "odd" $HOME'


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:1"),
        ("0.0.0.0", "http://127.0.0.1:1"),
        ("::", "http://[::1]:1"),
        ("fe80::1", "http://[fe80::1]:1"),
        ("name", "http://name:1"),
    ],
)
def test_url_of(host: str, url: str) -> None:
    assert url_of(host, 1) == url


def test_work_line_counts_what_happened_since() -> None:
    now = after_10_s(
        counters=SchedulerCounters(num_computed_tokens=1955, num_output_tokens=755, num_preemptions=2),
        num_running=3,
        num_waiting=1,
        fa_use=PoolUse(num_blocks=200, num_free=100, num_cached=50, num_referenced=48, num_deferred=2),
    )
    assert work_line(IDLE, now) == (
        "25.5 tokens/s out, 45.5 through the model, 3 running, 1 waiting, KV 25%, 2 preempted"
    )


def test_work_line_moves_in_the_middle_of_a_long_prompt() -> None:
    """Such a prompt is counted as such once, when it begins; its tokens are computed step by step."""
    before = after_10_s(counters=SchedulerCounters(num_prompt_tokens=9000, num_computed_tokens=2000))
    counters = SchedulerCounters(num_prompt_tokens=9000, num_computed_tokens=2512)
    line = work_line(before, msgspec.structs.replace(before, now_s=120.0, counters=counters, num_running=1))
    assert line == "0.0 tokens/s out, 51.2 through the model, 1 running, 0 waiting, KV 0%"


def test_work_line_is_silent_only_when_nothing_happened() -> None:
    assert work_line(IDLE, after_10_s()) is None
    assert work_line(IDLE, after_10_s(num_waiting=1)) is not None  # stalled: worth a line
    assert work_line(after_10_s(num_running=1), after_10_s()) is not None  # just ended
    assert work_line(IDLE, after_10_s(counters=SchedulerCounters(num_output_tokens=501))) is not None


def test_work_line_names_the_window_pool_where_there_is_one() -> None:
    use = PoolUse(num_blocks=10, num_free=0, num_cached=0, num_referenced=10, num_deferred=0)
    line = work_line(IDLE, after_10_s(swa_use=use, num_running=1))
    assert line is not None
    assert "KV 0%, window KV 100%" in line


def test_progress_bar() -> None:
    assert progress_bar(0, 100, 10) == "[----------]   0%"
    assert progress_bar(512, 1024, 10) == "[#####-----]  50%"
    assert progress_bar(9, 5, 10) == "[##########] 100%"
    assert progress_bar(0, 0, 10) == "[##########] 100%"


def test_the_remote_cache_is_named_without_its_password() -> None:
    settings = Settings(model="m", remote_cache="redis://:secret@store:6379/1", remote_write_back=False)
    text = start_block("1.0", MODEL, settings, "http://127.0.0.1:8000")
    assert "redis://...@store:6379/1, 64.0 MiB of staging memory, nothing is saved" in text
    assert "secret" not in text
    assert "remote cache" not in start_block("1.0", MODEL, Settings(model="m"), "http://127.0.0.1:8000")


def test_the_line_says_what_the_remote_cache_gave_and_that_it_is_down() -> None:
    counters = SchedulerCounters(num_prompt_tokens=2000, num_output_tokens=500)
    now = after_10_s(
        counters=counters,
        cache=CacheCounters(num_remote_hit_tokens=96),
        remote=RemoteCacheStatus(store_ok=False, saves_ok=False),
    )
    line = work_line(IDLE, now)
    assert line is not None
    assert line.endswith("96 tokens from the remote cache, remote cache down")
    full = after_10_s(counters=counters, remote=RemoteCacheStatus(saves_ok=False))
    assert str(work_line(IDLE, full)).endswith("remote cache takes no blocks")
