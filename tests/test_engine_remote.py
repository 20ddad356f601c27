"""A remote cache in the engine: everything is real but device, store and clock.

The simulated device checks the KV of every position that attention reads, and the caches are checked after
every message, so a run that ends is a run in which nothing wrong was read and nothing leaked.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

import ksana.engine_checks
from ksana.config import Settings
from ksana.devices.simulated import SimulatedBackend
from ksana.engine import Engine
from ksana.errors import ConfigError, InvariantViolated
from ksana.messages.base import Message
from ksana.messages.outputs import Failed, Finished
from ksana.messages.remote import LoadPrefix, PrefixLoaded
from ksana.messages.status import EngineStatus
from ksana.model_setup import ModelFiles
from ksana.runtime.deterministic import run_deterministic
from ksana.runtime.virtual_clock import VirtualClock
from ksana.stores.block_places import block_path
from ksana.stores.filesystem import FilesystemStore
from ksana.stores.simulated import SimulatedStore

from .engines import Heard, greedy, is_balanced, listen, model_files, prompt, settled, simulated
from .models_for_tests import tiny_gemma3_dir, tiny_llama_dir

LONG = range(6, 306)
"""A prompt of 300 tokens: 18 blocks that may be reused."""
Values = dict[bytes, bytes]


@pytest.fixture(scope="module", params=["llama", "gemma"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    make = tiny_llama_dir if request.param == "llama" else tiny_gemma3_dir
    return model_files(make(tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def filled(files: ModelFiles) -> Values:
    """What a store holds after another engine has computed LONG."""
    values: Values = {}
    heard = run(files, ask(LONG), store=SimulatedStore(1, values=values))
    assert heard.usage.num_cached_tokens == 0
    assert len(values) >= 18
    return values


Script = Callable[[Engine], Awaitable[Any]]


def run(files: ModelFiles, script: Script, *, store: SimulatedStore | None, **more: Any) -> Any:
    """Run a script in an engine; all blocks are free or cache at its end. Returns what the script does."""
    engine = simulated(files, store=store, remote_cache_staging=more.pop("staging", 1 << 20), **more)

    async def main() -> Any:
        with trio.fail_after(1000):
            async with engine:
                result = await script(engine)
                status = await quiet(engine)
                assert status.num_core_crashes == 0
                return result

    return run_deterministic(0, main, VirtualClock())


async def quiet(engine: Engine) -> EngineStatus:
    """Nothing is in flight, write-backs included."""
    with trio.fail_after(60):
        while True:
            status = await settled(engine)
            remote = status.remote
            is_done = remote is None or not (
                remote.num_loading or (remote.store_ok and remote.num_queued_blocks)
            )
            if is_done and is_balanced(status.swa_use):
                return status
            await trio.sleep(0.1)


def ask(tokens: Sequence[int], num_output: int = 20, **more: Any) -> Callable[[Engine], Awaitable[Heard]]:
    async def script(engine: Engine) -> Heard:
        return await listen(engine.generate(prompt(*tokens), greedy(num_output), **more))

    return script


def copy_of(values: Values, seed: int = 1, **more: Any) -> SimulatedStore:
    return SimulatedStore(seed, values=dict(values), **more)


async def timed(engine: Engine, tokens: Sequence[int], num_output: int = 4) -> tuple[float, Heard]:
    began_s = trio.current_time()
    heard = await ask(tokens, num_output)(engine)
    assert isinstance(heard.outcome, Finished)
    return trio.current_time() - began_s, heard


# Hits


def test_an_empty_engine_goes_on_from_what_another_one_computed(files: ModelFiles, filled: Values) -> None:
    cold = run(files, ask(LONG), store=None)
    store = copy_of(filled)

    async def script(engine: Engine) -> Heard:
        heard = await ask(LONG)(engine)
        status = await quiet(engine)
        assert status.cache.num_remote_hit_tokens == 288
        assert status.remote is not None
        assert dict(status.remote.num_loads) == {"loaded": 1}
        assert status.remote.num_loaded_tokens == 288
        again = await ask(LONG)(engine)
        assert again.usage.num_cached_tokens == 288
        assert engine.status().cache.num_remote_hit_tokens == 288  # the second hit was local
        return heard

    heard = run(files, script, store=store)
    assert heard.token_ids == cold.token_ids
    assert heard.usage.num_cached_tokens == 288


def test_no_hit_across_salts_models_or_block_sizes(files: ModelFiles, filled: Values) -> None:
    values = dict(filled)

    def num_cached(one: ModelFiles, **more: Any) -> int:
        asked = ask(LONG, cache_salt=more.pop("cache_salt", ""))
        heard: Heard = run(one, asked, store=SimulatedStore(1, values=values), **more)
        return heard.usage.num_cached_tokens

    other = ModelFiles(path=files.path, fingerprint="1" * 64, spec=files.spec, tokenizer=files.tokenizer)
    for num_tokens in (0, 288):  # each has saved its own the first time
        assert num_cached(files, cache_salt="x") == num_tokens
        assert num_cached(files, block_size=32) == num_tokens
        assert num_cached(other) == num_tokens
        assert num_cached(files) == 288


def test_nothing_is_saved_without_write_back(files: ModelFiles) -> None:
    store = SimulatedStore(1)
    run(files, ask(LONG), store=store, remote_write_back=False)
    assert not store.values
    assert store.counts.puts == 0


# A store that breaks


@pytest.mark.parametrize("fault", ["missing_share", "vanishing_share", "corrupt_share", "truncated_share"])
@pytest.mark.parametrize("share", [0.1, 1.0])
def test_a_store_that_loses_or_damages_blocks(
    files: ModelFiles, filled: Values, fault: str, share: float
) -> None:
    expected = run(files, ask(LONG), store=None).token_ids
    for seed in range(4):
        store = copy_of(filled, seed)
        setattr(store.faults, fault, share)
        heard = run(files, ask(LONG), store=store)
        assert isinstance(heard.outcome, Finished)
        assert heard.token_ids == expected
        if share == 1.0:
            assert heard.usage.num_cached_tokens == 0


@pytest.mark.parametrize("fault", ["down", "frozen"])
def test_a_dead_store_costs_one_deadline_in_all(files: ModelFiles, filled: Values, fault: str) -> None:
    store = copy_of(filled)

    async def script(engine: Engine) -> float:
        return sum([(await timed(engine, [n + 6, *LONG]))[0] for n in range(10)])

    undisturbed_s = run(files, script, store=None)
    if fault == "down":
        store.faults.down = True
    else:
        store.freeze()
    assert run(files, script, store=store) < undisturbed_s + 5.0


@pytest.mark.parametrize("after_s", [0.0005, 0.002, 0.005, 0.01, 0.02])
@pytest.mark.parametrize("fault", ["down", "frozen"])
def test_a_store_that_dies_in_mid_load_and_comes_back(
    files: ModelFiles, filled: Values, fault: str, after_s: float
) -> None:
    expected = run(files, ask(LONG, 4), store=None).token_ids
    store = copy_of(filled, bytes_per_s=1e7)

    async def script(engine: Engine) -> None:
        async def die() -> None:
            await trio.sleep(after_s)
            store.freeze() if fault == "frozen" else setattr(store.faults, "down", True)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(die)
            seconds, heard = await timed(engine, LONG)
        assert seconds < 6.0
        assert heard.token_ids == expected
        for n in range(3):
            await timed(engine, [n + 7, *LONG])
        store.thaw()
        store.faults.down = False
        await trio.sleep(60)  # long enough for a probe to find it alive
        status = engine.status()
        assert status.remote is not None
        assert status.remote.store_ok
        num_before = store.counts.puts
        await timed(engine, [20, *LONG])
        await quiet(engine)
        assert store.counts.puts > num_before

    run(files, script, store=store)


# Every state of a load

STATES = (
    "LoadPrefix",
    "GetRequestPrefixBlockNumberBeforeRemoteCacheLoading",
    "PrefixBlockNumber",
    "StoreFind",
    "AllocateBlocksForRemoteCache",
    "RemoteBlocksAllocated",
    "StoreFetch",
    "CopyFromStaging",
    "ConfirmRemoteCacheLoadingResult",
    "RemoteLoadingConfirmed",
    "PrefixLoaded",
)


class Trigger:
    """A tap that acts as soon as some actor has said a message of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.act: Callable[[], None] | None = None
        self.at_s: float | None = None
        self.loads = 0
        self.answers = 0

    def __call__(self, _actor: str, now_s: float, _in: Sequence[Message], said: Sequence[Any]) -> None:
        for _, message in said:
            self.loads += isinstance(message, LoadPrefix)
            self.answers += isinstance(message, PrefixLoaded)
            if type(message).__name__ == self.kind and self.at_s is None:
                self.at_s = now_s
                if self.act is not None:
                    self.act()


@pytest.mark.parametrize("state", STATES)
def test_abort_in_every_state(files: ModelFiles, filled: Values, state: str) -> None:
    trigger = Trigger(state)

    async def script(engine: Engine) -> None:
        stream = engine.generate(prompt(*LONG), greedy(20))
        trigger.act = stream.close
        with trio.move_on_after(5):
            await listen(stream)
        status = await quiet(engine)
        assert status.counters.num_aborted == 1
        _, heard = await timed(engine, LONG)
        assert heard.usage.num_cached_tokens == 288

    run(files, script, store=copy_of(filled), tap=trigger)
    assert trigger.at_s is not None
    assert trigger.answers == trigger.loads >= 2


@pytest.mark.parametrize("state", STATES)
def test_timeout_in_every_state(files: ModelFiles, filled: Values, state: str) -> None:
    first = Trigger(state)
    began_s = 0.0

    async def script(engine: Engine) -> None:
        nonlocal began_s
        began_s = trio.current_time()
        await timed(engine, LONG)

    run(files, script, store=copy_of(filled), tap=first)
    assert first.at_s is not None
    timeout_s = max(first.at_s - began_s, 1e-9)
    second = Trigger(state)

    async def too_late(engine: Engine) -> None:
        heard = await ask(LONG, timeout_s=timeout_s)(engine)
        assert isinstance(heard.outcome, Failed)
        assert heard.outcome.status == 504
        assert trio.current_time() - began_s == pytest.approx(timeout_s, abs=0.05)
        _, heard = await timed(engine, LONG)
        assert heard.usage.num_cached_tokens == 288

    run(files, too_late, store=copy_of(filled), tap=second)
    assert second.answers == second.loads >= 1


@pytest.mark.parametrize("state", STATES)
def test_the_worker_is_killed_in_every_state(files: ModelFiles, filled: Values, state: str) -> None:
    expected = run(files, ask(LONG), store=None).token_ids
    trigger = Trigger(state)
    made: list[SimulatedBackend] = []

    async def script(engine: Engine) -> None:
        trigger.act = made[0].kill
        heard = await ask(LONG)(engine)
        assert heard.token_ids == expected
        status = await quiet(engine)
        assert status.num_worker_restarts == 1
        assert heard.usage.num_cached_tokens == 288

    run(files, script, store=copy_of(filled), tap=trigger, made=made)
    assert trigger.at_s is not None
    assert trigger.answers == trigger.loads


@pytest.mark.parametrize("state", STATES)
def test_the_engine_stops_in_every_state(files: ModelFiles, filled: Values, state: str) -> None:
    trigger = Trigger(state)
    store = copy_of(filled)

    async def main() -> None:
        reached = trio.Event()
        trigger.act = reached.set
        engine = simulated(files, store=store, remote_cache_staging=1 << 20, tap=trigger, drain_timeout=0)
        async with engine:
            stream = engine.generate(prompt(*LONG), greedy(200))
            await reached.wait()
            store.freeze()
            began_s = trio.current_time()
        assert trio.current_time() - began_s < 10
        heard = await listen(stream)
        assert isinstance(heard.outcome, Failed)
        assert heard.outcome.status == 503

    run_deterministic(0, main, VirtualClock())


@pytest.mark.parametrize("seed", range(6))
def test_loads_in_a_pool_that_is_too_small_for_all(files: ModelFiles, filled: Values, seed: int) -> None:
    """Preemptions, refused and cancelled loads: each request gets its tokens."""
    preempted = 0

    async def script(engine: Engine) -> None:
        nonlocal preempted

        async def one(number: int) -> None:
            await trio.sleep(0.01 * ((number * 7 + seed) % 5))
            tokens = [*LONG[: 60 * (number % 4) + 100], number + 6]
            heard = await ask(tokens, 100)(engine)
            assert isinstance(heard.outcome, Finished), heard.outcome
            assert len(heard.token_ids) == 100

        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(one, number)
        status = await quiet(engine)
        preempted = status.counters.num_preemptions
        assert status.remote is not None
        assert dict(status.remote.num_loads).get("loaded", 0) > 0

    size = "420KiB" if files.spec.num_sliding_layers else "360KiB"
    run(
        files,
        script,
        store=copy_of(filled, seed, bytes_per_s=2e7),
        kv_cache_memory=size,
        max_num_seqs=6,
        max_model_len=420,
    )
    assert preempted > 0


def test_two_large_loads_that_together_exceed_the_pool(files: ModelFiles) -> None:
    one, other = range(6, 306), range(10, 310)
    values: Values = {}

    async def fill(engine: Engine) -> None:
        await timed(engine, one)
        await timed(engine, other)

    run(files, fill, store=SimulatedStore(1, values=values))

    async def script(engine: Engine) -> None:
        pool = engine.status().fa_use
        assert pool is not None
        assert pool.num_blocks < 40  # each needs 20
        heard: list[Heard] = []

        async def ask_for(tokens: Sequence[int]) -> None:
            heard.append(await ask(tokens, 10)(engine))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_for, one)
            nursery.start_soon(ask_for, other)
        assert all(isinstance(h.outcome, Finished) for h in heard)
        assert max(h.usage.num_cached_tokens for h in heard) == 288

    size = "520KiB" if files.spec.num_sliding_layers else "400KiB"
    run(
        files,
        script,
        store=SimulatedStore(1, values=values, bytes_per_s=1e7),
        kv_cache_memory=size,
        max_model_len=330,
    )


def test_blocks_held_for_a_frozen_store_are_waited_for(files: ModelFiles) -> None:
    """The second request needs most of the pool, and the store has blocks of the first until its deadline."""
    store = SimulatedStore(1)
    trigger = Trigger("StoreSave")
    trigger.act = store.freeze

    async def script(engine: Engine) -> None:
        pool = engine.status().fa_use
        assert pool is not None
        tokens = range(6, 6 + pool.num_blocks * 16 - 110)
        await timed(engine, [20, *tokens], 30)
        held = engine.status().fa_use
        assert held is not None
        assert held.num_held > 6
        seconds, _ = await timed(engine, [21, *tokens], 30)
        assert 5 < seconds < 15

    size = "420KiB" if files.spec.num_sliding_layers else "300KiB"
    run(
        files,
        script,
        store=store,
        tap=trigger,
        kv_cache_memory=size,
        max_model_len=330,
        remote_cache_timeout=1,
        staging=4 << 20,
    )


def test_stalled_is_not_said_of_an_engine_that_loads(files: ModelFiles, filled: Values) -> None:
    store = copy_of(filled)
    store.freeze()

    async def script(engine: Engine) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(timed, engine, LONG)
            await trio.sleep(0.1)
            status = engine.status()
            assert status.num_loading == 1
            assert status.num_waiting == 1
            assert status.has_work
            assert status.unhealthy_because(120) is None

    run(files, script, store=store)


# Checks of a running engine


def test_a_cache_that_is_not_consistent_is_found_while_idle(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    verdicts = [InvariantViolated("a block is in two places")]
    real = ksana.engine_checks.check_together

    def check(*cores: Any) -> None:
        real(*cores)
        if verdicts:
            raise verdicts.pop()

    monkeypatch.setattr(ksana.engine_checks, "check_together", check)

    async def main() -> None:
        async with simulated(files) as engine:
            await timed(engine, LONG)
            await trio.sleep(100)
            assert engine.status().num_core_crashes == 1
            await timed(engine, LONG)
            await trio.sleep(1000)
            assert engine.status().num_core_crashes == 1

    with caplog.at_level(logging.CRITICAL):
        run_deterministic(0, main, VirtualClock())
    assert "not consistent" in caplog.text


def put_obstacles(root: Path, obstacle: str, keys: Sequence[bytes]) -> None:
    root.mkdir(mode=0o700)
    for number, key in enumerate(keys):
        place = Path(block_path(str(root), key))
        if obstacle == "directories" and number % 2:
            place.mkdir(parents=True)
        elif obstacle != "directories" and key[0] % 2 and not place.parent.exists():
            place.parent.write_text("x")


@pytest.mark.parametrize("obstacle", ["directories", "a file for every second shard"])
async def test_what_stands_where_blocks_belong_keeps_nobody_from_saving_the_others(
    files: ModelFiles, filled: Values, tmp_path: Path, obstacle: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "cache"
    put_obstacles(root, obstacle, sorted(filled))
    store = FilesystemStore.open(str(root), max_bytes=1 << 30)
    async with simulated(files, store=store, remote_cache_staging=1 << 20) as engine:
        await ask(LONG)(engine)
        await ask(range(400, 500))(engine)
        status = await quiet(engine)
    remote = status.remote
    assert remote is not None
    assert (remote.store_ok, remote.saves_ok, remote.num_breaker_openings) == (True, True, 0)
    assert remote.num_unusable_blocks > 3
    assert remote.num_saved_blocks > 3
    assert sum(path.is_file() for path in root.rglob("*.safetensors")) == remote.num_saved_blocks
    lines = [line for line in caplog.messages if "stands in their places" in line]
    assert 1 <= len(lines) <= 2
    async with simulated(files, store=store, remote_cache_staging=1 << 20) as engine:  # and from reading
        heard = await ask(LONG)(engine)
        assert isinstance(heard.outcome, Finished)
        status = await quiet(engine)
    assert status.remote is not None
    assert (status.remote.store_ok, status.remote.num_store_errors) == (True, 0)


def test_settings_that_cannot_work(files: ModelFiles) -> None:
    async def main(settings: Settings) -> None:
        async with Engine(settings, files=files):
            pass

    for changes, text in (
        ({"remote_cache_staging": 100}, "--remote-cache-staging"),
        ({"enable_prefix_caching": False}, "prefix caching"),
        ({"remote_cache": "http://x"}, "http"),
    ):
        values: dict[str, Any] = {"remote_cache": "redis://127.0.0.1:1/0", **changes}
        with pytest.raises(ConfigError, match=text):
            trio.run(
                main, Settings(model=str(files.path), kv_cache_memory="2MiB", max_model_len=256, **values)
            )
