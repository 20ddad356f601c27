"""The journal of a whole engine: generations of actors, a disk that hangs, a start that fails."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import trio

from ksana.config import Settings
from ksana.engine import Engine
from ksana.errors import ConfigError
from ksana.journal.files import SegmentFiles
from ksana.journal.reading import list_segments
from ksana.journal.replay import replay
from ksana.messages.outputs import Ended, Finished
from ksana.messages.requests import SamplingParams, TokensPrompt
from ksana.messages.steps import WorkerReady
from ksana.runtime.virtual_clock import VirtualClock
from tests.engines import model_files, simulated
from tests.models_for_tests import tiny_llama_dir

ACTORS: Any = ("scheduler", "block_allocator")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama_dir(tmp_path_factory.mktemp("model"))


async def answer(engine: Engine, number: int) -> Ended:
    prompt = TokensPrompt(token_ids=tuple(range(10, 40 + number)))
    last: Any = None
    async with engine.generate(prompt, SamplingParams(seed=number, max_tokens=20, ignore_eos=True)) as events:
        async for event in events:
            last = event
    assert isinstance(last, Ended)
    return last


def test_a_generation_that_breaks_is_recorded_and_the_next_one_too(model: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with simulated(model_files(model), journal=str(tmp_path)) as engine:
            assert isinstance((await answer(engine, 1)).outcome, Finished)
            engine._mailboxes.block_allocator.put(WorkerReady(pool_epoch=7))  # nothing for an allocator
            await trio.sleep(1)
            assert engine.status().num_core_crashes == 1
            assert isinstance((await answer(engine, 2)).outcome, Finished)

    trio.run(main, clock=VirtualClock())
    first, second = list_segments(tmp_path)
    assert (first.header.generation, second.header.generation) == (1, 2)
    assert first.header.run == second.header.run
    report = replay([first, second], ACTORS)
    assert report.difference is None
    [note] = report.notes
    assert "the block_allocator raised, as recorded: InvariantViolated: the block allocator was sent" in note


def test_a_disk_that_hangs_holds_up_neither_serving_nor_the_end(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = threading.Event()
    monkeypatch.setattr(SegmentFiles, "write", lambda *_: hanging.wait(60))
    monkeypatch.setattr("ksana.journal.journal.CLOSE_WITHIN_S", 0.1)
    monkeypatch.setattr("ksana.journal.journal.WRITE_EVERY_S", 0.01)

    async def main() -> None:
        files = model_files(model)
        with_threads = simulated(files, journal=str(tmp_path))
        with_threads._threads = True
        async with with_threads as engine:
            for number in range(3):
                assert isinstance((await answer(engine, number)).outcome, Finished)
        assert not hanging.is_set()

    try:
        trio.run(main)
    finally:
        hanging.set()


def test_a_bug_while_writing_ends_the_journal_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(SegmentFiles, "write", broken)

    async def main() -> None:
        async with simulated(model_files(model), journal=str(tmp_path)) as engine:
            assert isinstance((await answer(engine, 1)).outcome, Finished)
            await trio.sleep(1)
            status = engine.status().journal
            assert status is not None
            assert status.stopped == "ValueError while writing"
            assert isinstance((await answer(engine, 2)).outcome, Finished)

    trio.run(main, clock=VirtualClock())


def test_what_cannot_be_recorded_is_told_before_anything_is_loaded(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    loaded: list[object] = []

    async def main() -> None:
        settings = Settings(model=str(model), kv_cache_memory="2MiB", journal=str(tmp_path / "file"))
        engine = Engine(settings, files=model_files(model), backend=loaded.append)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="cannot be written"):
            async with engine:
                pass

    trio.run(main)
    assert not loaded
