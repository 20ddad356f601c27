"""The engine with a worker process: one without torch that is quick, and the real one."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import trio

from ksana.config import Settings
from ksana.devices.inline import InlineBackend
from ksana.devices.process import ProcessBackend
from ksana.engine import Engine
from ksana.messages.outputs import Finished
from ksana.messages.requests import TextPrompt
from ksana.model_setup import ModelFiles, ModelSetup

from .devices.test_process import COMMAND, is_running
from .engines import Heard, greedy, listen, model_files, prompt, settled
from .models_for_tests import smollm2_gguf, tiny_gemma3_dir, tiny_llama_dir


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return model_files(tiny_llama_dir(tmp_path_factory.mktemp("llama")))


def with_fake_worker(files: ModelFiles, made: list[ProcessBackend]) -> Engine:
    def backend(setup: ModelSetup) -> ProcessBackend:
        made.append(ProcessBackend(setup.worker_settings(), command=COMMAND))
        return made[0]

    settings = Settings(model=str(files.path), max_model_len=512, kv_cache_memory="2MiB", drain_timeout=2)
    return Engine(settings, files=files, backend=backend)


async def four_streams(
    engine: Engine, max_tokens: int, kill_at: int | None, pid: int | None
) -> list[list[int]]:
    """Four streams; the worker is killed when one of them has `kill_at` tokens."""
    heard: dict[int, Heard] = {}
    killed = False

    def on_token(num_tokens: int) -> None:
        nonlocal killed
        if kill_at is not None and num_tokens >= kill_at and not killed:
            killed = True
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

    async def one(number: int) -> None:
        stream = engine.generate(prompt(*range(6, 20 + number)), greedy(max_tokens))
        heard[number] = await listen(stream, on_token=on_token if number == 0 else None)

    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(one, number)
    assert killed == (kill_at is not None)
    assert all(isinstance(h.outcome, Finished) for h in heard.values())
    return [heard[number].token_ids for number in range(4)]


async def test_kill_9_in_mid_stream(llama: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WORKER_STEP_S", "0.005")
    made: list[ProcessBackend] = []
    async with with_fake_worker(llama, made) as engine:
        undisturbed = await four_streams(engine, 40, None, None)
        assert await four_streams(engine, 40, 10, made[0].pid) == undisturbed
        status = await settled(engine)
        assert status.num_worker_restarts == 1
        assert status.counters.num_failed == 0
        pid = made[0].pid
    assert pid is not None
    assert not is_running(pid)


async def test_leaving_ends_a_worker_that_hangs(llama: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WORKER_STEP_S", "600")
    made: list[ProcessBackend] = []
    began_s = time.monotonic()
    async with trio.open_nursery() as nursery, with_fake_worker(llama, made) as engine:
        nursery.start_soon(listen, engine.generate(prompt(6, 7), greedy(5)))
        await trio.sleep(0.1)
        pid = made[0].pid
    assert time.monotonic() - began_s < 15
    assert pid is not None
    assert not is_running(pid)


async def test_the_engines_own_time_per_step(llama: ModelFiles) -> None:
    """With a device that takes no time, 32 rows: messages, planning, blocks, text, and the hop to the worker.

    A loose bound, since machines are busy; the benchmark prints the number.
    """
    made: list[ProcessBackend] = []
    async with with_fake_worker(llama, made) as engine:
        began_s = time.perf_counter()
        before = engine.status().counters.num_steps
        async with trio.open_nursery() as nursery:
            for number in range(32):
                nursery.start_soon(listen, engine.generate(prompt(*range(6, 20 + number)), greedy(100)))
        num_steps = engine.status().counters.num_steps - before
        per_step_s = (time.perf_counter() - began_s) / num_steps
    assert num_steps >= 100
    assert per_step_s < 0.02, f"{per_step_s * 1e3:.2f} ms per step"


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "gemma"])
async def test_the_real_worker_gives_the_same_tokens_whatever_happens(family: str, tmp_path: Path) -> None:
    directory = tiny_llama_dir(tmp_path) if family == "llama" else tiny_gemma3_dir(tmp_path)
    settings = Settings(
        model=str(directory),
        max_model_len=512,
        max_num_batched_tokens=48,
        kv_cache_memory="8MiB",
        num_threads=1,
        worker_start_timeout=120,
    )
    seen: list[tuple[int, int]] = []
    async with Engine(settings, progress=lambda done, total: seen.append((done, total))) as engine:
        assert seen[-1][0] == seen[-1][1] > 0
        assert "CPU" in engine.client.model.device
        backend = engine._executor._backend
        assert isinstance(backend, ProcessBackend)
        cold = await four_streams(engine, 60, None, None)
        warm = await four_streams(engine, 60, None, None)
        after_kill = await four_streams(engine, 60, 20, backend.pid)
        assert warm == cold
        assert after_kill == cold
        alone = await listen(engine.generate(prompt(*range(6, 20)), greedy(60)))
        assert alone.token_ids == cold[0]
        status = await settled(engine)
        assert status.cache.num_hit_tokens > 0
    assert await inline_tokens(directory, block_size=8, max_num_batched_tokens=19) == cold


async def inline_tokens(directory: Path, **settings: Any) -> list[list[int]]:
    """What the same model says in this process, with other blocks and chunks."""
    from ksana.devices.build import build_runner

    def backend(setup: ModelSetup) -> InlineBackend:
        worker, fingerprint = setup.worker_settings(), setup.files.fingerprint
        return InlineBackend(lambda: build_runner(worker, fingerprint, lambda _done, _total: None))

    made = Settings(
        model=str(directory), max_model_len=512, kv_cache_memory="8MiB", num_threads=1, **settings
    )
    async with Engine(made, backend=backend) as engine:
        return await four_streams(engine, 60, None, None)


@pytest.mark.slow
async def test_kill_9_with_smollm2() -> None:
    settings = Settings(
        model=str(smollm2_gguf()), max_model_len=1024, kv_cache_memory="256MiB", num_threads=1
    )
    texts = ["Once upon a time", "The capital of France is", "def fibonacci(n):", "1, 2, 3, 4,"]
    async with Engine(settings) as engine:
        backend = engine._executor._backend
        assert isinstance(backend, ProcessBackend)

        async def all_of_them(kill: bool) -> list[str]:
            heard: dict[int, Heard] = {}

            def on_token(num_tokens: int) -> None:
                if kill and num_tokens == 10:
                    assert backend.pid is not None
                    os.kill(backend.pid, signal.SIGKILL)

            async def one(number: int) -> None:
                stream = engine.generate(TextPrompt(text=texts[number]), greedy(24))
                heard[number] = await listen(stream, on_token=on_token if number == 0 else None)

            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(one, number)
            return [heard[number].text for number in range(4)]

        undisturbed = await all_of_them(kill=False)
        assert await all_of_them(kill=True) == undisturbed
        assert engine.status().num_worker_restarts == 1
        assert " Paris" in undisturbed[1]
