"""What Prometheus is told, under the names that the field's dashboards know, with the prefix `ksana:`.

Latencies are seen from here, per prompt, from when it was handed to the engine. All counters are the
engine's own, read when somebody asks: it also knows of requests whose client left, and nobody reads any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import trio
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from ksana.client import Client
from ksana.messages.blocks import PoolUse
from ksana.messages.outputs import Ended, Finished, OutputEvent, TextDelta
from ksana.messages.status import EngineStatus

METRICS_CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_TTFT_S = (
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    320,
)
_TPOT_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_E2E_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 3840)
_LABEL = "model_name"


class Metrics:
    """All series of one gateway, in a registry of their own."""

    def __init__(self, client: Client) -> None:
        self.registry = CollectorRegistry()
        self._name = client.model.name

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"ksana:{name}", text, [_LABEL], buckets=buckets, registry=self.registry)
            return made.labels(self._name)

        self._ttft = histogram("time_to_first_token_seconds", "Request handed in until first output", _TTFT_S)
        self._tpot = histogram(
            "time_per_output_token_seconds",
            "Mean time per output token after the first, per request",
            _TPOT_S,
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Request handed in until its end", _E2E_S)
        self.registry.register(_EngineCollector(client, self._name))

    def observe(self, num_prompts: int) -> Callable[[int, OutputEvent], None]:
        """A listener to the events of one HTTP request that begins now."""
        started_s = trio.current_time()
        first_s: list[float | None] = [None] * num_prompts

        def listen(index: int, event: OutputEvent) -> None:
            if isinstance(event, TextDelta):
                if first_s[index] is None:
                    first_s[index] = now = trio.current_time()
                    self._ttft.observe(now - started_s)
            elif isinstance(event, Ended):
                self._ended(event, started_s, first_s[index])

        return listen

    def _ended(self, event: Ended, started_s: float, first_s: float | None) -> None:
        if not isinstance(event.outcome, Finished):
            return
        now = trio.current_time()
        self._e2e.observe(now - started_s)
        if first_s is not None and event.usage.num_output_tokens > 1:
            self._tpot.observe((now - first_s) / (event.usage.num_output_tokens - 1))

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Reads the engine's status when Prometheus asks."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._name = name

    def collect(self) -> Iterator[Metric]:
        status = self._client.status()
        for name, text, value in _gauges(status):
            gauge = GaugeMetricFamily(f"ksana:{name}", text, labels=[_LABEL])
            gauge.add_metric([self._name], value)
            yield gauge
        for name, text, value in _counters(status):
            counter = CounterMetricFamily(f"ksana:{name}", text, labels=[_LABEL])
            counter.add_metric([self._name], value)
            yield counter
        for name, text, label, values in _labelled_counters(status):
            family = CounterMetricFamily(f"ksana:{name}", text, labels=[_LABEL, label])
            for key, value in values:
                family.add_metric([self._name, key], value)
            yield family


def _gauges(status: EngineStatus) -> Iterator[tuple[str, str, float]]:
    yield "num_requests_running", "Requests in steps", status.num_running
    yield "num_requests_waiting", "Requests waiting for a place in a step", status.num_waiting
    yield (
        "num_open_slots",
        "Requests anywhere in the engine, or whose output is not taken yet",
        status.num_open_slots,
    )
    yield (
        "kv_cache_usage_perc",
        "KV blocks in use, 0 to 1 (cached ones that could be evicted not counted)",
        _used(status.fa_use),
    )
    yield "swa_cache_usage_perc", "The same for sliding-window blocks", _used(status.swa_use)
    yield "worker_ready", "1 while a worker can run steps", float(status.worker_state == "ready")
    if status.journal is not None:
        yield "journal_up", "1 while decisions are recorded", float(status.journal.stopped is None)
    if status.remote is not None:
        yield "num_requests_loading", "Waiting requests whose prefixes are being loaded", status.num_loading
        yield (
            "remote_cache_up",
            "1 while the remote cache is used; 0 while its breaker for reading or for saving is open",
            float(status.remote.store_ok and status.remote.saves_ok),
        )
        yield (
            "remote_cache_queued_blocks",
            "Computed blocks that wait to be saved to the remote cache",
            status.remote.num_queued_blocks,
        )


def _counters(status: EngineStatus) -> Iterator[tuple[str, str, float]]:
    yield (
        "prompt_tokens",
        "Prompt tokens of requests that ran, each request once",
        status.counters.num_prompt_tokens,
    )
    yield "generation_tokens", "Output tokens", status.counters.num_output_tokens
    yield "computed_tokens", "Tokens that went through the model", status.counters.num_computed_tokens
    yield "steps", "Steps done", status.counters.num_steps
    yield "num_preemptions", "Requests preempted", status.counters.num_preemptions
    yield (
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache",
        status.cache.num_queried_tokens,
    )
    yield "prefix_cache_hits", "Prompt tokens found there", status.cache.num_hit_tokens
    yield "worker_restarts", "Workers started again after one was lost", status.num_worker_restarts
    yield "core_crashes", "Actors that broke and failed all requests", status.num_core_crashes
    yield "requests_refused", "Requests told 429", status.num_refused
    if status.journal is not None:
        yield "journal_bytes", "Bytes recorded in the journal", status.journal.num_bytes


def _labelled_counters(
    status: EngineStatus,
) -> Iterator[tuple[str, str, str, tuple[tuple[str, float], ...]]]:
    cache, remote, counters = status.cache, status.remote, status.counters
    ends = (
        ("stop", counters.num_stopped),
        ("length", counters.num_length),
        ("error", counters.num_failed),
        ("abort", counters.num_aborted),
    )
    yield "request_success", "Requests that ended, by how", "finished_reason", ends
    # What sliding windows let be used of the FA hit; of that, the rest was here without a load.
    hits = [
        ("full_attention", cache.num_fa_hit_tokens),
        ("local", cache.num_hit_tokens - cache.num_remote_hit_tokens),
    ]
    evictions: list[tuple[str, float]] = [("full_attention", cache.num_fa_evictions)]
    if status.swa_use is not None:
        hits.append(("sliding_window", cache.num_hit_tokens))
        evictions.append(("sliding_window", cache.num_swa_evictions))
    hits.append(("remote", cache.num_remote_hit_tokens))
    yield "prefix_cache_hit_tokens", "Prompt tokens found in the cache, by kind", "kind", tuple(hits)
    yield "cache_evictions", "Cached blocks evicted, by pool", "pool", tuple(evictions)
    if remote is None:
        return
    yield "remote_cache_loads", "Loads of prefixes, by outcome", "outcome", remote.num_loads
    yield (
        "remote_cache_blocks",
        "Blocks brought from the remote cache and saved to it",
        "direction",
        (("loaded", remote.num_loaded_blocks), ("saved", remote.num_saved_blocks)),
    )
    yield (
        "remote_cache_bytes",
        "Bytes of KV brought from the remote cache and saved to it",
        "direction",
        (("loaded", remote.num_loaded_bytes), ("saved", remote.num_saved_bytes)),
    )
    yield (
        "remote_cache_faults",
        "What went wrong with the store; no request fails of it",
        "kind",
        (
            ("error", remote.num_store_errors),
            ("timeout", remote.num_store_timeouts),
            ("missing", remote.num_missing_blocks),
            ("corrupt", remote.num_corrupt_blocks),
            ("unusable", remote.num_unusable_blocks),
            ("unsaved", remote.num_unsaved_blocks),
            ("breaker_opened", remote.num_breaker_openings),
        ),
    )


def _used(use: PoolUse | None) -> float:
    if use is None or not use.num_blocks:
        return 0.0
    return (use.num_referenced + use.num_deferred + use.num_held) / use.num_blocks
