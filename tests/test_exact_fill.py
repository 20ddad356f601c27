"""Whole engines whose pools hold their longest request to the token: start, answers, and what is said of one
token more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from ksana.config import Settings
from ksana.devices.inline import InlineBackend
from ksana.engine import Engine
from ksana.errors import ConfigError
from ksana.messages.outputs import Failed, Finished
from ksana.messages.requests import TokensPrompt
from ksana.model_setup import ModelFiles, ModelSetup, set_up
from ksana.runtime.virtual_clock import VirtualClock

from .engines import Heard, greedy, listen, model_files, simulated
from .models_for_tests import tiny_gemma3_dir, tiny_llama_dir

PROMPT_LEN, NUM_OUTPUT = 160, 161
"""KV for 320 positions, which are 20 blocks of 16."""
LENGTH = PROMPT_LEN + NUM_OUTPUT
NUM_BLOCKS = 20


@pytest.fixture(scope="module", params=[tiny_llama_dir, tiny_gemma3_dir], ids=["full", "full and sliding"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    make: Callable[[Path], Path] = request.param
    return model_files(make(tmp_path_factory.mktemp("model")))


def made(files: ModelFiles, kv_bytes: int, length: int = LENGTH) -> Settings:
    return Settings(
        model=str(files.path),
        max_model_len=length,
        kv_cache_memory=str(kv_bytes),
        max_num_batched_tokens=64,
        num_threads=1,
    )


def least_bytes(files: ModelFiles) -> int:
    """The smallest KV memory with which an engine of LENGTH starts."""
    low, high = 1, 64 << 20
    while low < high:
        middle = (low + high) // 2
        try:
            set_up(made(files, middle), files)
            high = middle
        except ConfigError:
            low = middle + 1
    return low


def prompt(number: int, length: int = PROMPT_LEN) -> TokensPrompt:
    return TokensPrompt(token_ids=tuple(6 + (number + i * i) % 200 for i in range(length)))


async def answers(engine: Engine, numbers: range) -> list[Heard]:
    heard: dict[int, Heard] = {}

    async def one(number: int) -> None:
        heard[number] = await listen(
            engine.generate(prompt(number), greedy(NUM_OUTPUT, ignore_eos=True), cache_salt=str(number))
        )

    async with trio.open_nursery() as nursery:
        for number in numbers:
            nursery.start_soon(one, number)
    for each in heard.values():
        assert isinstance(each.outcome, Finished), each.outcome
        assert each.outcome.reason == "length"
        assert len(each.token_ids) == NUM_OUTPUT
    return [heard[number] for number in numbers]


def test_pools_that_hold_the_longest_request_to_the_token_are_enough(files: ModelFiles) -> None:
    kv_bytes = least_bytes(files)
    setup = set_up(made(files, kv_bytes), files)
    assert setup.pools.num_fa_blocks == NUM_BLOCKS
    for length in (LENGTH + 1, LENGTH + 100):
        with pytest.raises(ConfigError, match=f"the largest --max-model-len that fits is {LENGTH}[,;]"):
            set_up(made(files, kv_bytes, length), files)
    with pytest.raises(ConfigError, match=f"cannot hold --max-model-len {LENGTH}"):
        set_up(made(files, kv_bytes - 1), files)


def test_it_runs_and_one_token_more_is_a_400_that_says_what_fits(files: ModelFiles) -> None:
    trio.run(check_alone, files, clock=VirtualClock())


async def check_alone(files: ModelFiles) -> None:
    kv_bytes = str(least_bytes(files))
    async with simulated(files, max_model_len=LENGTH, kv_cache_memory=kv_bytes) as engine:
        await answers(engine, range(1))
        await answers(engine, range(1, 3))  # one after the other finds room
        for max_tokens, length in ((NUM_OUTPUT + 1, PROMPT_LEN), (1, LENGTH)):
            refused = await listen(engine.generate(prompt(9, length), greedy(max_tokens, ignore_eos=True)))
            assert isinstance(refused.outcome, Failed)
            assert refused.outcome.status == 400
            assert refused.outcome.code == "context_length_exceeded"
            assert str(LENGTH) in refused.outcome.message


def test_as_many_as_fit_together_run_together(tmp_path: Path) -> None:
    trio.run(check_together, model_files(tiny_llama_dir(tmp_path)), clock=VirtualClock())


async def check_together(files: ModelFiles) -> None:
    kv_bytes = str(2 * least_bytes(files))
    async with simulated(files, max_model_len=LENGTH, kv_cache_memory=kv_bytes) as engine:
        assert engine.setup.pools.num_fa_blocks == 2 * NUM_BLOCKS
        await answers(engine, range(2))
        assert engine.status().counters.num_preemptions == 0


async def test_a_real_model_says_the_same_in_the_smallest_pool_as_in_an_ample_one(files: ModelFiles) -> None:
    from ksana.devices.build import build_runner

    def backend(setup: ModelSetup) -> InlineBackend:
        worker, fingerprint = setup.worker_settings(), setup.files.fingerprint
        return InlineBackend(lambda: build_runner(worker, fingerprint, lambda _done, _total: None))

    said = []
    for kv_bytes in (least_bytes(files), 8 << 20):
        async with Engine(made(files, kv_bytes), files=files, backend=backend) as engine:
            said.append([heard.token_ids for heard in await answers(engine, range(1))])
    assert said[0] == said[1]
