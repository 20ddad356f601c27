"""Storms: everything at once, by seed. Tiny pools, shared prefixes, preemption, eviction, leaving."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from ksana.messages.requests import SamplingParams, TokensPrompt
from ksana.model_setup import ModelFiles
from ksana.models.decoder import Model
from ksana.models.loader import load_model

from ..engines import is_balanced, listen, model_files, settled
from ..models_for_tests import tiny_gemma3_dir, tiny_llama_dir
from .recording import recorded_engine
from .traffic import SAMPLED, Answer, Ask, answer, check_same, play

MAKERS: dict[str, Callable[[Path], Path]] = {"llama": tiny_llama_dir, "gemma": tiny_gemma3_dir}
NUM_ASKS = 40
Tiny = tuple[ModelFiles, Model]


@pytest.fixture(scope="module", params=list(MAKERS))
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelFiles, Model]:
    directory = MAKERS[request.param](tmp_path_factory.mktemp("model"))
    return model_files(directory), load_model(directory)


def branching_asks(rng: random.Random) -> list[Ask]:
    """Prompts that grow out of each other, so that they share prefixes of all lengths."""
    prompts: list[list[int]] = [[]]
    made = []
    for number in range(NUM_ASKS):
        trunk = rng.choice(prompts)
        trunk = trunk[: rng.randrange(len(trunk) + 1)] if rng.random() < 0.5 else trunk
        prompt = (trunk + rng.choices(range(6, 40), k=rng.randrange(1, 40)))[-120:]
        prompts.append(prompt)
        changes = {"temperature": 0.0} if rng.random() < 0.5 else SAMPLED
        sampling = SamplingParams(
            seed=number, max_tokens=rng.choice([1, 3, 10, 40]), ignore_eos=rng.random() < 0.7, **changes
        )
        made.append(Ask(tuple(prompt), sampling))
    return made


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
async def test_a_storm_changes_nothing(tiny: Tiny, seed: int) -> None:
    files, model = tiny
    rng = random.Random(seed)
    asked = branching_asks(rng)
    engine, recording = recorded_engine(
        files, model, max_model_len=176, kv_cache_memory="16MiB", enable_prefix_caching=False, num_threads=1
    )
    async with engine:
        alone = [(await play(engine, [ask], recording))[0] for ask in asked]

    per_token = sum(files.spec.kv_bytes_per_token(kind, 4) for kind in ("full", "sliding"))
    engine, recording = recorded_engine(
        files,
        model,
        max_model_len=176,
        kv_cache_memory=str(per_token * rng.randrange(260, 500)),
        block_size=rng.choice([8, 16, 32]),
        max_num_batched_tokens=rng.choice([5, 16, 33, 64]),
        max_num_seqs=rng.choice([3, 8, 20]),
        plan_ahead=rng.random() < 0.8,
        window_open_at_start=rng.random() < 0.8,
        swa_eviction=rng.choice(["lfu", "lru"]),
        num_threads=1,
    )
    answers: dict[int, Answer] = {}

    async def one(number: int, delay_s: float) -> None:
        await trio.sleep(delay_s)
        answers[number] = await answer(engine, asked[number], recording)

    async def leave(ask: Ask, delay_s: float, num_tokens: int) -> None:
        await trio.sleep(delay_s)
        await listen(
            engine.generate(TokensPrompt(token_ids=ask.token_ids), ask.sampling), leave_after=num_tokens
        )

    async with engine:
        for _ in range(3):
            async with trio.open_nursery() as nursery:
                for number in range(NUM_ASKS):
                    nursery.start_soon(one, number, rng.random() * 0.2)
                for _ in range(NUM_ASKS // 3):
                    nursery.start_soon(leave, rng.choice(asked), rng.random() * 0.2, rng.randrange(0, 20))
            check_same(asked, [answers[number] for number in range(NUM_ASKS)], alone)
            assert not recording.differing
        status = await settled(engine)
    assert is_balanced(status.swa_use)
    assert status.num_core_crashes == status.num_worker_restarts == 0
    assert status.cache.num_hit_tokens > 0
