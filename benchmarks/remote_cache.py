"""Time to the first token of a long prompt that another engine has computed before, through each store.

    python -m benchmarks.remote_cache [--model smollm2-135m] [--tokens 2000] [--rounds 5]

Needs nothing but the demo model; Redis is left out where there is no `redis-server`. Each engine has a worker
process of its own. One round is one new prompt of random ids:

    cold    the first engine has never seen it. It saves what it computes meanwhile, but for the first line,
            where there is no remote cache
    warm    the first engine is asked again, and goes on from its own cache
    remote  once everything is saved, a second engine with the same store is asked

Medians over the rounds, and the remote time as a share of the cold one. `load` is how fast the second engine
brought blocks into its pools: from the store, through the checksum, and by the worker. `put` and `get` are
the store alone, with blocks of the model's size and as many at once as an engine asks for. Both engines have
computed a prompt before the first round, so they know what computing costs, and load only if that is faster;
a round in which they did not is told.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import trio
from msgspec.structs import replace

from ksana.config import Settings
from ksana.engine import Engine
from ksana.messages.outputs import Ended, Finished, TextDelta
from ksana.messages.requests import SamplingParams, TokensPrompt
from ksana.messages.status import EngineStatus
from ksana.stores.store import Store, open_store

AT_ONCE = 32
"""Blocks that an engine asks for at the same time: 4 orders of 8."""
NUM_BLOCKS = 128


@dataclass
class Times:
    """Seconds of each round."""

    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    remote: list[float] = field(default_factory=list)
    load_bytes_per_s: list[float] = field(default_factory=list)
    """Bytes that were loaded by the time to the first token."""
    block_bytes: int = 0


async def first_token(engine: Engine, prompt: tuple[int, ...]) -> tuple[float, int]:
    """(seconds to the first token, tokens that were cached)"""
    began_s, first_s, num_cached = time.perf_counter(), 0.0, 0
    sampling = SamplingParams(seed=0, temperature=0.0, max_tokens=1, ignore_eos=True)
    async for event in engine.generate(TokensPrompt(token_ids=prompt), sampling):
        if isinstance(event, TextDelta) and not first_s:
            first_s = time.perf_counter()
        elif isinstance(event, Ended):
            assert isinstance(event.outcome, Finished), event
            num_cached = event.usage.num_cached_tokens
    return first_s - began_s, num_cached


async def quiet(engine: Engine) -> EngineStatus:
    """Nothing runs, and everything is saved."""
    num_quiet = 0
    while True:
        status = engine.status()
        pool, remote = status.fa_use, status.remote
        is_saving = remote is not None and remote.store_ok and remote.num_queued_blocks
        is_held = pool is not None and pool.num_held
        num_quiet = 0 if status.has_work or is_saving or is_held else num_quiet + 1
        if num_quiet == 3:
            return status
        await trio.sleep(0.02)


async def measure(
    settings: Settings, rounds: int, num_tokens: int, rng: random.Random, *, with_second: bool
) -> Times:
    times = Times()

    def new_prompt(vocab_size: int) -> tuple[int, ...]:
        return tuple(rng.randrange(100, vocab_size) for _ in range(num_tokens))

    async with Engine(settings) as first:
        times.block_bytes = first.setup.pools.fa_block_bytes
        vocab_size = first.client.model.vocab_size
        if not with_second:
            await first_token(first, new_prompt(vocab_size))
            for _ in range(rounds):
                await cold_and_warm(first, new_prompt(vocab_size), times)
            return times
        async with Engine(settings) as second:
            for engine in (first, second):
                await first_token(engine, new_prompt(vocab_size))
                await quiet(engine)
            for _ in range(rounds):
                prompt = new_prompt(vocab_size)
                await cold_and_warm(first, prompt, times)
                await quiet(first)
                await remote(second, prompt, times)
                await quiet(second)
    return times


async def cold_and_warm(engine: Engine, prompt: tuple[int, ...], times: Times) -> None:
    seconds, num_cached = await first_token(engine, prompt)
    assert num_cached == 0
    times.cold.append(seconds)
    seconds, num_cached = await first_token(engine, prompt)
    assert num_cached > len(prompt) * 0.9, num_cached
    times.warm.append(seconds)


async def remote(engine: Engine, prompt: tuple[int, ...], times: Times) -> None:
    before = engine.status().remote
    seconds, num_cached = await first_token(engine, prompt)
    after = engine.status().remote
    assert before is not None
    assert after is not None
    times.remote.append(seconds)
    if num_cached > len(prompt) * 0.9:
        times.load_bytes_per_s.append((after.num_loaded_bytes - before.num_loaded_bytes) / seconds)
    else:
        outcomes = dict(after.num_loads)
        for outcome, count in before.num_loads:
            outcomes[outcome] -= count
        print(
            f"  {num_cached} tokens came from the store; loads: { {k: v for k, v in outcomes.items() if v} }"
        )


async def store_speeds(url: str, block_bytes: int) -> tuple[float, float]:
    """(put, get) in bytes/s."""
    store: Store = open_store(url, max_bytes=None)
    keys = [b"benchmark %d" % number for number in range(NUM_BLOCKS)]
    data = random.Random(1).randbytes(block_bytes)
    buffers = [bytearray(block_bytes) for _ in range(AT_ONCE)]

    async def each(do: Callable[[int], Awaitable[object]]) -> float:
        began_s = time.perf_counter()
        for first in range(0, NUM_BLOCKS, AT_ONCE):
            async with trio.open_nursery() as nursery:
                for number in range(first, first + AT_ONCE):
                    nursery.start_soon(do, number)
        return NUM_BLOCKS * block_bytes / (time.perf_counter() - began_s)

    async def put(number: int) -> None:
        await store.put(keys[number], memoryview(data))

    async def get(number: int) -> None:
        assert await store.get(keys[number], memoryview(buffers[number % AT_ONCE]))

    try:
        return await each(put), await each(get)
    finally:
        await store.aclose()


async def compare(settings: Settings, rounds: int, num_tokens: int) -> None:
    from tests.redis_server import RedisServer

    rng = random.Random(0)
    print(f"{settings.model}, {num_tokens} tokens, medians of {rounds} rounds, times to the first token")
    print(f"{'':12}{'cold':>9}{'warm':>9}{'remote':>9}{'remote/cold':>13}{'load':>11}{'put':>11}{'get':>11}")
    times = await measure(settings, rounds, num_tokens, rng, with_second=False)
    print_row("none", times)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        urls = {"filesystem": f"file://{directory}/blocks"}
        redis = RedisServer(directory)
        if shutil.which("redis-server"):
            redis.start()
            urls["redis"] = redis.url
        try:
            for title, url in urls.items():
                there = replace(settings, remote_cache=url)
                times = await measure(there, rounds, num_tokens, rng, with_second=True)
                print_row(title, times, await store_speeds(url, times.block_bytes))
        finally:
            redis.kill()
    if "redis" not in urls:
        print("redis-server is not installed, so Redis was left out (Debian package redis-server)")


def print_row(title: str, times: Times, put_get: tuple[float, float] | None = None) -> None:
    cold, warm = statistics.median(times.cold), statistics.median(times.warm)
    row = f"{title:12}{cold * 1e3:6.0f} ms{warm * 1e3:6.0f} ms"
    if times.remote:
        remote_s = statistics.median(times.remote)
        row += f"{remote_s * 1e3:6.0f} ms{remote_s / cold:13.2f}"
        speeds = (statistics.median(times.load_bytes_per_s or [0.0]), *(put_get or ()))
        row += "".join(f"{speed / 1e6:6.0f} MB/s" for speed in speeds)
    print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m", help="as for ksana serve; default: the demo model")
    parser.add_argument("--tokens", type=int, default=2000, help="in the prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block-size", type=int, default=16)
    options = parser.parse_args()
    settings = Settings(
        model=options.model,
        block_size=options.block_size,
        kv_cache_memory="768MiB",
        max_model_len=options.tokens + 64,
    )
    trio.run(compare, settings, options.rounds, options.tokens)


if __name__ == "__main__":
    main()
