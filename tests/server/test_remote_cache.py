"""Server processes that share a remote cache, and stores that die under them. Clients see nothing of that."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.models_for_tests import smollm2_gguf
from tests.processes import eventually
from tests.redis_server import RedisServer
from tests.server.conftest import Serve
from tests.server.process import ServerProcess

needs_redis = pytest.mark.needs_program("redis-server", "redis-server")
BLOCK_SIZE = 16
TIMEOUT_S = 2
"""--remote-cache-timeout: what a load may take."""


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


def series(server: ServerProcess) -> dict[str, float]:
    """All series of /metrics, as `name` or `name{label value}`, without `ksana:` and `_total`."""
    with server.http() as http:
        text = http.get("/metrics").raise_for_status().text
    return {
        sample.name.removeprefix("ksana:").removesuffix("_total")
        + "".join(
            f"{{{value}}}" for label, value in sample.labels.items() if label != "model_name"
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def body(prompt: list[int], num_tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, **more}


def ask(http: httpx.Client, prompt: list[int], num_tokens: int = 8, **more: Any) -> tuple[str, int]:
    """(text, tokens that were cached)"""
    answer = http.post("/v1/completions", json=body(prompt, num_tokens, **more))
    assert answer.status_code == 200, answer.text
    answered = answer.json()
    usage = answered["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    assert usage["completion_tokens"] == num_tokens
    return answered["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"]


def prompts_of(num_prompts: int, num_tokens: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(6, 320), k=num_tokens) for _ in range(num_prompts)]


def reusable(num_tokens: int) -> int:
    return (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


def wait_until_saved(server: ServerProcess, num_blocks: int) -> dict[str, float]:
    def saved() -> dict[str, float] | None:
        now = series(server)
        is_idle = now["remote_cache_queued_blocks"] == now["kv_cache_usage_perc"] == 0
        return now if is_idle and now["remote_cache_blocks{saved}"] >= num_blocks else None

    return eventually(saved, explain=lambda: f"not saved: {series(server)}\n{server.log}")


def check_shared(first: ServerProcess, second: ServerProcess, prompt: list[int]) -> None:
    """What the first has computed, the second loads; another salt's it does not."""
    with first.http() as http:
        text, num_cached = ask(http, prompt, cache_salt="x")
        assert num_cached == 0
        assert ask(http, prompt, cache_salt="x") == (text, reusable(len(prompt)))
        assert series(first)["prefix_cache_hit_tokens{local}"] == reusable(len(prompt))
    was = wait_until_saved(first, len(prompt) // BLOCK_SIZE)
    assert was["prefix_cache_hit_tokens{remote}"] == 0
    with second.http() as http:
        before = series(second)
        assert ask(http, prompt, cache_salt="x") == (text, reusable(len(prompt)))
        after = series(second)
        gained = {name: value - before.get(name, 0) for name, value in after.items()}
        assert gained["prefix_cache_hit_tokens{remote}"] == reusable(len(prompt))
        assert gained["prefix_cache_hit_tokens{local}"] == 0
        assert gained["prefix_cache_hits"] == reusable(len(prompt))
        assert gained["remote_cache_loads{loaded}"] == 1
        assert gained["remote_cache_blocks{loaded}"] == reusable(len(prompt)) / BLOCK_SIZE
        per_block = was["remote_cache_bytes{saved}"] / was["remote_cache_blocks{saved}"]
        assert gained["remote_cache_bytes{loaded}"] == per_block * reusable(len(prompt)) / BLOCK_SIZE
        faults = {name: value for name, value in after.items() if name.startswith("remote_cache_faults")}
        assert len(faults) == 7
        assert not any(faults.values()), faults
        assert after["remote_cache_up"] == 1
        if len(prompt) < 1000:
            assert ask(http, prompt, cache_salt="y") == (text, 0)


def test_two_servers_share_a_directory(serve: Serve, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/blocks"
    first, second = serve("--remote-cache", url), serve("--remote-cache", url)
    check_shared(first, second, prompts_of(1, 300)[0])


@needs_redis
def test_two_servers_share_a_redis(serve: Serve, redis: RedisServer) -> None:
    first, second = (serve("--remote-cache", f"{redis.url}/3") for _ in range(2))
    check_shared(first, second, prompts_of(1, 300)[0])
    assert int(redis.cli("-n", "3", "DBSIZE")) >= 300 // BLOCK_SIZE


@pytest.mark.slow
@needs_redis
def test_two_servers_with_smollm2(serve: Serve, redis: RedisServer, tmp_path: Path) -> None:
    flags = ("--kv-cache-memory", "256MiB", "--max-model-len", "2100")
    prompt = prompts_of(1, 2000)[0]
    for url in (f"file://{tmp_path}/blocks", redis.url):
        pair = [serve(*flags, "--remote-cache", url, model=str(smollm2_gguf())) for _ in range(2)]
        check_shared(pair[0], pair[1], prompt)
        for server in pair:
            server.kill()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://127.0.0.1:1/", "http"),
        pytest.param("redis://127.0.0.1:1/x", "Redis URL", marks=pytest.mark.slow),
        pytest.param("file://elsewhere/blocks", "file:///", marks=pytest.mark.slow),
        pytest.param("file:///dev/null/blocks", "/dev/null/blocks", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_url(serve: Serve, url: str, text: str) -> None:
    ended, out, err = serve("--remote-cache", url).wait()
    assert (ended, out) == (2, ""), err
    assert "Traceback" not in err
    (line,) = (line for line in err.splitlines() if line.startswith("ksana: "))
    assert text in line


@pytest.mark.slow
def test_a_redis_that_is_not_there(serve: Serve) -> None:
    """It may come later; the server starts, and answers meanwhile."""
    server = serve("--remote-cache", "redis://127.0.0.1:1", "--remote-cache-timeout", str(TIMEOUT_S))
    with server.http() as http:
        for prompt in prompts_of(8, 300):
            _, num_cached = ask(http, prompt)
            assert num_cached == 0
        assert http.get("/health").status_code == http.get("/ready").status_code == 200
    now = series(server)
    assert now["remote_cache_faults{error}"] >= 3
    assert now["remote_cache_up"] == 0
    assert "the remote cache" in server.log


class Crowd:
    """Six clients that ask a server for the same prompts, more than fit into its pool, until told to stop."""

    def __init__(self, server: ServerProcess, expected: list[tuple[list[int], str]]) -> None:
        self._server, self._expected = server, expected
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(6)
        self.slowest_s = 0.0
        self.num_answers = 0
        self._asking = [self._pool.submit(self._ask, number) for number in range(6)]

    def _ask(self, number: int) -> None:
        with self._server.http() as http:
            at = 2 * number
            while not self._over.is_set():
                prompt, text = self._expected[at % len(self._expected)]
                began_s = time.monotonic()
                assert ask(http, prompt)[0] == text
                self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
                self.num_answers += 1
                at += 1

    def go_on(self, num_answers: int) -> None:
        """Wait for that many more answers. Fails if one was wrong."""
        wanted = self.num_answers + num_answers

        def reached() -> bool:
            for one in self._asking:
                if one.done():
                    one.result()
            return self.num_answers >= wanted

        eventually(reached, explain=lambda: f"{self.num_answers} answers of {wanted}:\n{self._server.log}")

    def stop(self) -> None:
        """Fails if an answer was wrong."""
        self._over.set()
        self._pool.shutdown()
        for one in self._asking:
            one.result()


@pytest.fixture
def crowded(serve: Serve, redis: RedisServer) -> Iterator[tuple[ServerProcess, Crowd]]:
    """A server whose pool holds four of the twelve prompts that its clients go round; Redis has the rest.

    Its steps are too small for a measurement of how fast it computes, so it loads whatever there is, although
    so small a model would be faster without.
    """
    prompts = prompts_of(12, 600)
    quiet = serve("--no-enable-prefix-caching")
    flags = ("--max-num-batched-tokens", "16", "--remote-cache-timeout", str(TIMEOUT_S))
    server = serve("--remote-cache", redis.url, *flags)
    with quiet.http() as http:
        expected = [(prompt, ask(http, prompt)[0]) for prompt in prompts]
    quiet.kill()
    crowd = Crowd(server, expected)
    try:
        crowd.go_on(24)
        eventually(lambda: series(server)["remote_cache_blocks{loaded}"] > 100)
        yield server, crowd
    finally:
        crowd.stop()


def check_whole(server: ServerProcess) -> dict[str, float]:
    """Nothing failed, nothing is held."""
    server.wait_until_idle()
    now = series(server)
    assert now["request_success{error}"] == now["request_success{abort}"] == 0
    assert now["worker_restarts"] == now["core_crashes"] == 0
    return now


@pytest.mark.slow
@needs_redis
def test_redis_is_killed_and_restarted_under_load(
    crowded: tuple[ServerProcess, Crowd], redis: RedisServer
) -> None:
    server, crowd = crowded
    for _ in range(2):
        redis.kill()
        crowd.go_on(60)
        eventually(lambda: series(server)["remote_cache_up"] == 0)
        redis.start()
        eventually(lambda: series(server)["remote_cache_up"] == 1)
        num_saved = series(server)["remote_cache_blocks{saved}"]
        crowd.go_on(24)
        assert redis.cli("DBSIZE") != b"0"
        assert series(server)["remote_cache_blocks{saved}"] > num_saved
    crowd.stop()
    now = check_whole(server)
    assert now["remote_cache_faults{error}"] >= 3
    assert now["remote_cache_faults{breaker_opened}"] >= 2
    assert now["remote_cache_faults{corrupt}"] == 0


@pytest.mark.slow
@needs_redis
def test_redis_is_frozen_under_load(crowded: tuple[ServerProcess, Crowd], redis: RedisServer) -> None:
    server, crowd = crowded
    redis.freeze()
    crowd.slowest_s = 0.0
    crowd.go_on(60)
    eventually(lambda: series(server)["remote_cache_up"] == 0)
    crowd.go_on(60)
    assert crowd.slowest_s < TIMEOUT_S + 20, "a frozen store made a request wait"
    with server.http() as http:
        assert http.get("/health").status_code == 200
    redis.thaw()
    eventually(lambda: series(server)["remote_cache_up"] == 1)
    crowd.go_on(24)
    crowd.stop()
    now = check_whole(server)
    assert now["remote_cache_faults{timeout}"] >= 1


@pytest.mark.slow
@needs_redis
def test_stopping_while_redis_is_frozen(crowded: tuple[ServerProcess, Crowd], redis: RedisServer) -> None:
    server, crowd = crowded
    redis.freeze()
    crowd.go_on(12)
    crowd.stop()
    server.send_signal(signal.SIGTERM)
    code, _, err = server.wait(timeout_s=30)
    assert code == 0, err
