"""The cache is not to be seen in what comes out: off, cold, warm, thinned, from a store, from a broken store.

As everywhere here, ids, text, ending and every bit of the logits are compared with each request asked alone
with no cache. The pools of every engine begin full of NaN, so what is read must have been computed or loaded.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import trio

from ksana.cache.chain_keys import chain_keys, root_key
from ksana.cache.window_match import last_valid_end, registered_blocks
from ksana.config import Settings
from ksana.devices.threads import default_num_threads
from ksana.engine import Engine
from ksana.errors import ConfigError
from ksana.messages.requests import SamplingParams
from ksana.messages.status import EngineStatus
from ksana.messages.stores import FA_KIND, SWA_KIND, RemoteCacheStatus
from ksana.model_setup import ModelFiles, ModelSetup, set_up
from ksana.models.decoder import Model
from ksana.models.loader import load_model

from ..engines import is_balanced, model_files
from ..models_for_tests import gemma3_gguf, smollm2_gguf, tiny_gemma3_dir, tiny_llama_dir
from .recording import Recording, recorded_engine
from .traffic import SAMPLED, Answer, Ask, answer, check_same, play

LONG_TEXT = Path(__file__).parent.parent / "data" / "long_text.txt"
NUM_OUTPUT = 12
BLOCK_SIZES = (16, 64)


@dataclass
class Case:
    """A model, what is asked of it, what it said without a cache, and stores that it has filled."""

    files: ModelFiles
    model: Model
    asked: list[Ask]
    directory: Path
    settings: dict[str, Any]
    alone: list[Answer] = field(default_factory=list)
    stores: dict[int, Path] = field(default_factory=dict)
    """By block size."""

    def engine(self, store: Path | None = None, **settings: Any) -> tuple[Engine, Recording]:
        if store is not None:
            settings["remote_cache"] = f"file://{store}"
        engine, recording = recorded_engine(self.files, self.model, **(self.settings | settings))
        return engine, recording

    async def ask_alone(self) -> None:
        for number, ask in enumerate(self.asked):
            engine, recording = self.engine(enable_prefix_caching=False, plan_ahead=False)
            async with engine:
                self.alone += await play(engine, [ask], recording)
                assert self.alone[number].num_cached_tokens == 0
        assert len({one.token_ids for one in self.alone}) == len(self.alone)

    async def filled(self, block_size: int) -> Path:
        """A store with all that is asked, filled by an engine whose cache was cold, then warm."""
        if block_size not in self.stores:
            store = self.directory / f"blocks-{block_size}"
            engine, recording = self.engine(store, block_size=block_size)
            async with engine:
                cold = await self.play(engine, recording)
                assert [one.num_cached_tokens for one in cold] == [0] * len(cold)
                warm = await self.play(engine, recording)
                assert [one.num_cached_tokens for one in warm] == self.reusable(block_size)
                status = await saved(engine)
                assert status.cache.num_remote_hit_tokens == 0
            self.stores[block_size] = store
        return self.stores[block_size]

    async def copy_of_filled(self, block_size: int, to: Path) -> Path:
        """For those who damage it. Files are linked, so they must be replaced, never written to."""
        return Path(shutil.copytree(await self.filled(block_size), to, copy_function=os.link))

    async def play(self, engine: Engine, recording: Recording, *, in_turn: bool = False) -> list[Answer]:
        """All that is asked, together or one after the other; the answers must be those given alone."""
        if in_turn:
            answers = [await answer(engine, ask, recording) for ask in self.asked]
        else:
            answers = await play(engine, self.asked, recording)
        check_same(self.asked, answers, self.alone)
        assert not recording.differing
        return answers

    async def ask_empty_engine(
        self, store: Path, number: int, **settings: Any
    ) -> tuple[Answer, RemoteCacheStatus]:
        """One request to an engine that has computed nothing yet; its answer must be the one given alone."""
        engine, recording = self.engine(store, **settings)
        async with engine:
            got = await answer(engine, self.asked[number], recording)
            status = await saved(engine)
        check_same([self.asked[number]], [got], [self.alone[number]])
        assert status.remote is not None
        assert status.cache.num_remote_hit_tokens == got.num_cached_tokens
        return got, status.remote

    def reusable(self, block_size: int) -> list[int]:
        return [(len(ask.token_ids) - 1) // block_size * block_size for ask in self.asked]

    def keys(self, number: int, block_size: int, kind: bytes) -> list[bytes]:
        """Store keys of the blocks of a prompt that may be reused."""
        setup = set_up(Settings(**self.settings, model="any", block_size=block_size), self.files)
        tokens = self.asked[number].token_ids[: self.reusable(block_size)[number]]
        chain = chain_keys(root_key(setup.kv_identity(), ""), tokens, block_size)
        return [key + kind for key in chain]


async def saved(engine: Engine) -> EngineStatus:
    """The status once nothing runs and nothing waits to be saved, looked at thrice."""
    with trio.fail_after(120):
        num_quiet = 0
        while True:
            status = engine.status()
            is_busy = status.has_work or status.num_open_slots
            is_saving = status.remote is not None and status.remote.num_queued_blocks
            is_whole = is_balanced(status.fa_use) and is_balanced(status.swa_use)
            num_quiet = 0 if is_busy or is_saving or not is_whole else num_quiet + 1
            if num_quiet == 3:
                return status
            await trio.sleep(0.005)


def asks(ids: Sequence[int], lengths: Sequence[int]) -> list[Ask]:
    """Prompts that begin differently; every other one samples."""
    made = []
    for number, length in enumerate(lengths):
        changes = {"temperature": 0.0} if number % 2 == 0 else SAMPLED
        prompt = tuple(ids[37 * number : 37 * number + length])
        assert len(prompt) == length
        sampling = SamplingParams(seed=number, max_tokens=NUM_OUTPUT, ignore_eos=True, **changes)
        made.append(Ask(prompt, sampling))
    return made


def tiny(make: Callable[..., Path], directory: Path, seed: int = 0) -> Case:
    model = make(directory, seed=seed)
    ids = random.Random(4).choices(range(6, 320), k=1000)
    settings = {"kv_cache_memory": "16MiB", "max_model_len": 1024, "num_threads": 1}
    settings |= {"max_num_batched_tokens": 64}
    asked = asks(ids, (100, 600, 640))
    return Case(model_files(model), load_model(model), asked, directory, settings)


def real(path: Path, directory: Path) -> Case:
    files = model_files(path)
    ids = files.tokenizer.encode(LONG_TEXT.read_text(), files.spec.num_sliding_layers > 0)
    ids = [*ids, *ids[::-1], *ids[::3]]
    settings = {"kv_cache_memory": "400MiB", "max_model_len": 3072, "num_threads": default_num_threads()}
    # The worker computes in the engine's own thread here, so all deadlines stand still meanwhile, and pass.
    settings |= {"max_num_batched_tokens": 128, "remote_cache_timeout": 60, "remote_cache_staging": 256 << 20}
    model = load_model(path, max_positions=settings["max_model_len"])
    return Case(files, model, asks(ids, (100, 600, 3000)), directory, settings)


CASES: dict[str, Callable[[Path], Case]] = {
    "llama": lambda tmp: tiny(tiny_llama_dir, tmp),
    "gemma": lambda tmp: tiny(tiny_gemma3_dir, tmp),
    "smollm2": lambda tmp: real(smollm2_gguf(), tmp),
    "gemma-3-270m": lambda tmp: real(gemma3_gguf(), tmp),
}
SLIDING = ["gemma", pytest.param("gemma-3-270m", marks=pytest.mark.slow)]
TINY = ["llama", "gemma"]


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
    made = CASES[request.param](tmp_path_factory.mktemp("remote"))
    trio.run(made.ask_alone)
    return made


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
async def test_cold_and_warm(case: Case, block_size: int) -> None:
    store = await case.filled(block_size)
    names = {path.stem for path in store.glob("??/*.safetensors")}
    for number in range(len(case.asked)):
        assert names >= {key.hex() for key in case.keys(number, block_size, FA_KIND)}
        if case.files.spec.num_sliding_layers:
            assert names >= {key.hex() for key in case.keys(number, block_size, SWA_KIND)}


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
async def test_loaded_into_an_empty_engine(case: Case, block_size: int) -> None:
    store = await case.filled(block_size)
    for number, num_reusable in enumerate(case.reusable(block_size)):
        got, remote = await case.ask_empty_engine(store, number, block_size=block_size)
        assert got.num_cached_tokens == num_reusable
        assert remote.num_loaded_tokens == num_reusable
        assert dict(remote.num_loads) == {"loaded": 1}


async def test_loaded_together(case: Case) -> None:
    """Into one empty engine at the same time, through staging memory that has to be used again and again."""
    store = await case.filled(16)
    block_bytes = set_up(Settings(**case.settings, model="any"), case.files).pools
    size = 24 * max(block_bytes.fa_block_bytes, block_bytes.swa_block_bytes)
    engine, recording = case.engine(store, remote_cache_staging=size)
    async with engine:
        answers = await case.play(engine, recording)
        status = await saved(engine)
    assert status.remote is not None
    assert dict(status.remote.num_loads) == {"loaded": len(case.asked)}
    assert [one.num_cached_tokens for one in answers] == case.reusable(16)


# Sliding windows with holes


@pytest.mark.parametrize("case", SLIDING, indirect=True)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("with_store", [False, True])
async def test_thinned_by_eviction(case: Case, block_size: int, with_store: bool) -> None:
    """SWA blocks are evicted while the FA blocks beside them stay; with a store they are loaded again."""
    window = case.files.spec.sliding_window
    assert window is not None
    store = await case.filled(block_size) if with_store else None
    rng = random.Random(11)
    others = [
        Ask(tuple(rng.choices(range(6, 300), k=window + 64)), case.asked[0].sampling)
        for _ in range(6 if with_store else 2)
    ]
    num_tokens = sum(len(ask.token_ids) + NUM_OUTPUT + block_size for ask in (*case.asked, *others))
    thin = thin_pool(case, block_size, num_tokens)
    if with_store:  # by use, what was loaded is worth more than what was computed
        thin["swa_eviction"] = "lru"
    engine, recording = case.engine(store, remote_write_back=False, **thin)
    if case.files.spec.hidden_size < 100:
        recording.pause_per_token_s = 0.0003
    async with engine:
        await case.play(engine, recording, in_turn=True)
        await play(engine, others)
        before = (await saved(engine)).cache
        await case.play(engine, recording, in_turn=True)
        after = (await saved(engine)).cache
    assert before.num_swa_evictions > 0
    assert after.num_fa_evictions == 0
    found = after.num_fa_hit_tokens - before.num_fa_hit_tokens
    used = after.num_hit_tokens - before.num_hit_tokens
    from_store = after.num_remote_hit_tokens - before.num_remote_hit_tokens
    assert found == sum(case.reusable(block_size))
    if with_store:
        assert used == found
        assert from_store > found // 2
    else:
        assert used < found


def thin_pool(case: Case, block_size: int, num_tokens: int) -> dict[str, Any]:
    """Settings of the smallest pools whose FA blocks hold `num_tokens`; the SWA blocks do not."""
    for kib in range(200, 400_000, 50):
        thin = {"kv_cache_memory": f"{kib}KiB", "block_size": block_size, "max_num_seqs": 1}
        try:
            pools = set_up(Settings(**(case.settings | thin), model="any"), case.files).pools
        except ConfigError:
            continue
        if pools.num_fa_blocks * block_size >= num_tokens:
            assert pools.num_swa_blocks * block_size < num_tokens * 3 // 4
            return thin
    raise AssertionError("no pool is large enough")


@pytest.mark.parametrize("case", SLIDING, indirect=True)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("damage", ["deleted", "corrupt"])
async def test_one_swa_block_fails(case: Case, block_size: int, damage: str, tmp_path: Path) -> None:
    """What is missing is known before a load begins, and it ends elsewhere. What is damaged turns out when it
    is there: the window has a hole then, and as much is computed as that takes."""
    store = await case.copy_of_filled(block_size, tmp_path / "blocks")
    window_blocks = -(-(case.files.spec.sliding_window or 0) // block_size)
    for number in range(len(case.asked)):
        keys = case.keys(number, block_size, SWA_KIND)
        if len(keys) < 2:
            continue
        broken = len(keys) - (min(2, window_blocks) if number % 2 else 1)
        harm([file_of(store, keys[broken])], damage)
        got, remote = await case.ask_empty_engine(
            store, number, block_size=block_size, remote_write_back=False
        )
        if damage == "deleted":
            here = [at != broken for at in range(len(keys))]
            assert remote.num_corrupt_blocks == 0
            assert dict(remote.num_loads) == {"loaded": 1} if broken else {"nothing": 1}
        else:
            loaded = registered_blocks(len(keys), window_blocks)
            here = [at in loaded and at != broken for at in range(len(keys))]
            assert remote.num_corrupt_blocks == 1
            assert dict(remote.num_loads) == {"partial": 1}
        endpoint = last_valid_end(here, window_blocks, window_open_at_start=True)
        assert got.num_cached_tokens == endpoint * block_size < case.reusable(block_size)[number]


@pytest.mark.parametrize("damage", ["deleted", "corrupt", "truncated", "empty", "replaced"])
@pytest.mark.parametrize("share", [2, 1])
async def test_a_damaged_store(case: Case, damage: str, share: int, tmp_path: Path) -> None:
    """All files, or every second one; with what was computed anew the store is whole again."""
    store = await case.copy_of_filled(16, tmp_path / "blocks")
    number = 1
    num_reusable = case.reusable(16)[number]
    kinds = [FA_KIND, SWA_KIND] if case.files.spec.num_sliding_layers else [FA_KIND]
    files = [file_of(store, key) for kind in kinds for key in case.keys(number, 16, kind)[share - 1 :: share]]
    harm(files, damage)
    got, remote = await case.ask_empty_engine(store, number)
    assert got.num_cached_tokens < num_reusable
    if damage == "deleted":
        assert remote.num_corrupt_blocks == 0
    else:
        assert remote.num_corrupt_blocks > 0
    assert remote.store_ok
    got, _ = await case.ask_empty_engine(store, number)
    assert got.num_cached_tokens == num_reusable


def file_of(store: Path, key: bytes) -> Path:
    return store / key.hex()[:2] / f"{key.hex()}.safetensors"


def harm(files: Sequence[Path], damage: str) -> None:
    whole = [file.read_bytes() for file in files]
    for at, file in enumerate(files):
        data = bytearray(whole[at])
        file.unlink()
        if damage == "corrupt":
            data[-1 - at * 7 % 500] ^= 1 << at % 8
        elif damage == "truncated":
            del data[len(data) * 3 // 4 :]
        elif damage == "empty":
            data.clear()
        elif damage == "replaced":  # by a good block of another key
            data[:] = whole[at - 1]
        if damage != "deleted":
            file.write_bytes(data)


# What must never match


@pytest.mark.parametrize("where", ["here", "in the store"])
async def test_no_hit_across_salts(case: Case, where: str, tmp_path: Path) -> None:
    store = tmp_path / "blocks" if where == "in the store" else None
    kept, _ = case.engine(store)
    asked = case.asked[:2]
    reusable = case.reusable(16)[:2]

    async def cached(salt: str) -> list[int]:
        """Tokens that were cached for each request, in the engine or in an empty one beside the store."""
        engine, recording = (kept, None) if store is None else case.engine(store)
        salted = [replace(ask, cache_salt=salt) for ask in asked]
        if recording is None:
            answers = await play(engine, salted)
        else:
            async with engine:
                answers = await play(engine, salted, recording)
                await saved(engine)
        check_same(asked, answers, case.alone[:2])
        return [one.num_cached_tokens for one in answers]

    async with kept:
        for salt in ("", "a", "b"):
            assert await cached(salt) == [0, 0]
        for salt in ("b", "", "a"):
            assert await cached(salt) == reusable


@pytest.mark.parametrize("case", TINY, indirect=True)
async def test_no_hit_across_models_blocks_and_types(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other weights of the same shape, other block sizes, and whatever else is part of the KV's identity:
    all share one store, and each finds what it has put there itself, and nothing else."""
    store = tmp_path / "blocks"
    make = tiny_gemma3_dir if case.files.spec.num_sliding_layers else tiny_llama_dir
    other = tiny(make, tmp_path / "other", seed=1)
    await other.ask_alone()
    assert other.files.spec == case.files.spec
    assert other.alone != case.alone
    real_identity = ModelSetup.kv_identity
    for num_asked in range(2):
        for one in (case, other):
            for block_size in BLOCK_SIZES:
                for kv_type in (b"float32", b"another"):
                    monkeypatch.setattr(
                        ModelSetup,
                        "kv_identity",
                        lambda setup, kv_type=kv_type: (
                            real_identity(setup)
                            if kv_type == b"float32"
                            else kv_type * 4 + real_identity(setup)
                        ),
                    )
                    got, _ = await one.ask_empty_engine(store, 1, block_size=block_size)
                    assert got.num_cached_tokens == (one.reusable(block_size)[1] if num_asked else 0)
