"""A request's answer depends on its prompt, its parameters and its seed, and on nothing else.

Everything is compared with each request asked alone, with no cache and nothing planned ahead: the ids, the
text, the ending, and every bit of the logits behind each token.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio

from ksana.config import Settings
from ksana.devices.process import ProcessBackend
from ksana.devices.threads import default_num_threads
from ksana.engine import Engine
from ksana.model_setup import ModelFiles
from ksana.models.decoder import Model
from ksana.models.loader import load_model

from ..engines import is_balanced, model_files, settled
from ..models_for_tests import gemma3_gguf, smollm2_gguf, tiny_gemma3_dir, tiny_llama_dir
from .recording import Recording, recorded_engine
from .traffic import Answer, Ask, asks, check_same, play

LONG_TEXT = Path(__file__).parent.parent / "data" / "long_text.txt"
LENGTHS = (1, 5, 9, 15, 16, 17, 31, 32, 33, 47, 64, 65, 80, 96, 127, 150)
SHARED = (7, 8, 12, 15)
"""Requests whose prompts begin alike."""


@dataclass
class Case:
    """A model, what is asked of it, and what it said to each request alone."""

    files: ModelFiles
    model: Model
    asked: list[Ask]
    max_model_len: int
    tight: str
    """A KV pool in which the short requests fit, but not with their outputs."""
    spread_s: float
    thin: str = ""
    """A KV pool that keeps the prefixes of some requests, with sliding windows for fewer of them."""
    num_thinnings: int = 1
    num_short: int = 17
    """Tokens of the prompts that are asked in the tight pool, where their outputs outgrow it."""
    usual: dict[str, Any] = field(default_factory=dict)
    alone: list[Answer] = field(default_factory=list)

    def engine(self, **settings: Any) -> tuple[Engine, Recording]:
        return recorded_engine(self.files, self.model, **(self.settings() | settings))

    def settings(self) -> dict[str, Any]:
        threads = 1 if self.files.spec.hidden_size < 100 else default_num_threads()
        return {"max_model_len": self.max_model_len, "max_num_seqs": 16, "num_threads": threads} | self.usual

    async def play(self, engine: Engine, recording: Recording | None, **how: Any) -> None:
        """All that is asked, together; the answers must be those given alone."""
        check_same(self.asked, await play(engine, self.asked, recording, **how), self.alone)
        if recording is not None:
            assert not recording.differing

    async def ask_alone(self) -> None:
        engine, recording = self.engine(
            kv_cache_memory="256MiB", enable_prefix_caching=False, plan_ahead=False
        )
        async with engine:
            for ask in self.asked:
                self.alone += await play(engine, [ask], recording)
            assert recording.num_planned_ahead == 0
            assert recording.max_rows == 1
        lengths = {
            len(one.token_ids) < (ask.sampling.max_tokens or 0)
            for ask, one in zip(self.asked, self.alone, strict=True)
        }
        assert lengths == {True, False}, "stop strings end some requests, and not others"
        assert len({one.token_ids[:8] for one in self.alone}) > len(self.alone) // 2, (
            "the answers hardly differ"
        )


def prompts_from(ids: Sequence[int], lengths: Sequence[int], shared: Sequence[int]) -> list[list[int]]:
    starts = [0 if number in shared else 37 * number + 11 for number in range(len(lengths))]
    return [list(ids[start : start + length]) for start, length in zip(starts, lengths, strict=True)]


def tiny(directory: Path) -> Case:
    files = model_files(directory)
    rng = random.Random(3)
    ids = [rng.randrange(6, 320) for _ in range(1000)]
    asked = asks(
        prompts_from(ids, LENGTHS, SHARED),
        [40] * 6 + [12 + number % 5 * 9 for number in range(10)],
        tuple("aeinost"),
    )
    tight = "120KiB" if files.spec.num_sliding_layers == 0 else "240KiB"
    return Case(files, load_model(directory), asked, 256, tight, 0.1, thin="900KiB", num_thinnings=3)


def smollm2() -> Case:
    path = smollm2_gguf()
    files = model_files(path)
    ids = files.tokenizer.encode(LONG_TEXT.read_text()[:6000], False)
    asked = asks(
        prompts_from(ids, LENGTHS, SHARED), [40] * 6 + [8 + number % 4 * 4 for number in range(10)], (" the",)
    )
    return Case(files, load_model(path, max_positions=1024), asked, 256, "7MiB", 2.0)


def gemma3() -> Case:
    """Two prompts longer than the window of 512, one of them beginning like a short one."""
    path = gemma3_gguf()
    files = model_files(path)
    ids = files.tokenizer.encode(LONG_TEXT.read_text()[:9000], True)
    prompts = prompts_from(ids, (1, 16, 33, 20, 100, 100, 600, 620), (4, 6))
    asked = asks(prompts, [40, 32, 40, 32, 20, 16, 16, 20], (" the", ",", "."))
    return Case(
        files,
        load_model(path, max_positions=1024),
        asked,
        900,
        "3800KiB",
        2.0,
        thin="60MiB",
        num_thinnings=2,
        num_short=33,
    )


CASES: dict[str, Callable[[Path], Case]] = {
    "llama": lambda tmp: tiny(tiny_llama_dir(tmp)),
    "gemma": lambda tmp: tiny(tiny_gemma3_dir(tmp)),
    "smollm2": lambda _tmp: smollm2(),
    "gemma-3-270m": lambda _tmp: gemma3(),
}


@pytest.fixture(
    scope="module",
    params=[
        "llama",
        "gemma",
        pytest.param("smollm2", marks=pytest.mark.slow),
        pytest.param("gemma-3-270m", marks=pytest.mark.slow),
    ],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    made = CASES[request.param](tmp_path_factory.mktemp("model"))
    trio.run(made.ask_alone)
    return made


async def test_in_company_that_comes_and_goes(case: Case) -> None:
    engine, recording = case.engine(kv_cache_memory="256MiB", max_num_seqs=24)
    async with engine:
        await case.play(engine, recording, spread_s=case.spread_s, num_passers_by=8)
        status = await settled(engine)
        assert status.counters.num_preemptions == 0
        assert recording.max_rows > 2


@pytest.mark.parametrize(
    ("block_size", "num_tokens", "plan_ahead"), [(16, 16, True), (64, 64, False), (64, 512, True)]
)
async def test_whatever_the_chunk_and_the_blocks(
    case: Case, block_size: int, num_tokens: int, plan_ahead: bool
) -> None:
    engine, recording = case.engine(
        kv_cache_memory="256MiB",
        block_size=block_size,
        max_num_batched_tokens=num_tokens,
        plan_ahead=plan_ahead,
        enable_prefix_caching=False,
    )
    async with engine:
        await case.play(engine, recording)
    assert (recording.num_planned_ahead > 5) == plan_ahead


async def test_prefix_cache_cold_and_warm(case: Case) -> None:
    engine, recording = case.engine(kv_cache_memory="256MiB", max_num_batched_tokens=48)
    async with engine:
        await case.play(engine, recording)
        cold = engine.status().cache.num_hit_tokens
        await case.play(engine, recording)
        warm = engine.status().cache.num_hit_tokens - cold
        num_prompt_tokens = sum(len(ask.token_ids) for ask in case.asked)
        assert warm > max(cold, num_prompt_tokens // 2)


@pytest.mark.parametrize("caching", [True, False])
async def test_after_preemption(case: Case, caching: bool) -> None:
    """Small blocks, so that outputs soon outgrow the one block that admission sets aside for them."""
    engine, recording = case.engine(
        kv_cache_memory=case.tight,
        block_size=8,
        max_model_len=96,
        max_num_batched_tokens=128,
        enable_prefix_caching=caching,
    )
    short = [number for number, ask in enumerate(case.asked) if len(ask.token_ids) <= case.num_short]
    asked = [case.asked[number] for number in short]
    async with engine:
        answers = await play(engine, asked, recording)
        status = await settled(engine)
    check_same(asked, answers, [case.alone[number] for number in short])
    assert not recording.differing
    assert status.counters.num_preemptions > 0
    assert is_balanced(status.swa_use)


@pytest.mark.parametrize(
    "case", ["gemma", pytest.param("gemma-3-270m", marks=pytest.mark.slow)], indirect=True
)
async def test_sliding_windows_thinned_by_other_traffic(case: Case) -> None:
    """SWA blocks are evicted before the FA blocks beside them, so a prefix is found and only some of it can
    be used: from none of it to all of it, in several rounds."""
    window = case.files.spec.sliding_window
    assert window is not None
    engine, recording = case.engine(
        kv_cache_memory=case.thin, max_num_batched_tokens=64, max_num_seqs=2, num_threads=None
    )
    rng = random.Random(11)
    partly = 0
    async with engine:
        await case.play(engine, recording)
        for _ in range(case.num_thinnings):
            others = [
                rng.choices(range(6, 300), k=rng.randrange(window // 2, window * 3 // 2))
                for _ in range(rng.randrange(1, 4))
            ]
            await play(engine, asks(others, [2] * len(others), ("x",)))
            before = engine.status().cache
            await case.play(engine, recording)
            after = engine.status().cache
            found = after.num_fa_hit_tokens - before.num_fa_hit_tokens
            used = after.num_hit_tokens - before.num_hit_tokens
            partly += 0 < used < found
        status = await settled(engine)
        assert status.cache.num_swa_evictions > 0
        assert partly > 0
        assert is_balanced(status.swa_use)


@pytest.mark.slow
async def test_kill_9_in_mid_stream(case: Case) -> None:
    """With the real worker process, which has its own copy of the model."""
    settings = Settings(model=str(case.files.path), kv_cache_memory="256MiB", **case.settings())
    async with Engine(settings, files=case.files) as engine:
        backend = engine._executor._backend
        assert isinstance(backend, ProcessBackend)
        killed: list[int] = []

        def on_token(num_tokens: int) -> None:
            if num_tokens >= 4 and not killed and backend.pid is not None:
                killed.append(backend.pid)
                os.kill(backend.pid, signal.SIGKILL)

        await case.play(engine, None, on_token=on_token)
        status = await settled(engine)
        assert len(killed) == status.num_worker_restarts == 1
        assert status.counters.num_failed == 0
        assert is_balanced(status.swa_use)
        await case.play(engine, None, spread_s=case.spread_s)
