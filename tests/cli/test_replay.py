"""`ksana replay`: what it prints, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from ksana.cli.main import main
from ksana.cli.replay import MAX_SHOWN_CHARS, shortened
from ksana.journal.reading import list_segments
from ksana.messages.requests import SamplingParams, TextPrompt
from ksana.runtime.virtual_clock import VirtualClock
from ksana.scheduling import scheduler as scheduler_module
from ksana.stores.simulated import SimulatedStore
from tests.engines import model_files, simulated
from tests.models_for_tests import tiny_llama_dir


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def journal(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an engine whose worker crashes once; long prompts are encoded apart, one leaves."""
    directory = tmp_path_factory.mktemp("journal")

    async def run() -> None:
        async with simulated(
            model_files(model),
            journal=str(directory),
            journal_segment_bytes=64 << 10,
            fault=lambda number, _plan: "planned crash" if number == 30 else None,
            store=SimulatedStore(1),
        ) as engine:

            async def ask(number: int, text: str, leave_after: int | None = None) -> None:
                sampling = SamplingParams(seed=number, max_tokens=30, stop=("e",))
                async with engine.generate(TextPrompt(text=text), sampling) as events:
                    count = 0
                    async for _ in events:
                        count += 1
                        if count == leave_after:
                            return

            async with trio.open_nursery() as nursery:
                for number in range(30):
                    nursery.start_soon(ask, number, f"number {number} " + "x y z " * 30)
                    await trio.sleep(0.05)
                nursery.start_soon(ask, 97, "lorem ipsum " * 500)
                nursery.start_soon(ask, 98, "one that leaves", 3)
            status = engine.status()
            assert status.num_worker_restarts == 1
            assert status.journal is not None
            assert status.journal.stopped is None
            assert status.journal.segment > 2

    trio.run(run, clock=VirtualClock())
    return directory


def replay(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["replay", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_all_the_same(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = replay(capsys, str(journal))
    assert code == 0
    assert out.startswith("All the same: ")
    assert "the tokenizer is left out: it needs --model" in err


def test_with_its_model_the_tokenizer_replays_too(
    journal: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = replay(capsys, str(journal), "--model", str(model))
    assert code == 0
    assert " of the tokenizer" in out
    code, out, _ = replay(capsys, str(journal), "--model", str(model), "--actor", "tokenizer")
    assert code == 0
    assert " of the scheduler" not in out


def test_one_segment_and_one_actor(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = replay(capsys, str(journal), "--segment", "2", "--actor", "scheduler")
    assert code == 0
    assert " of the scheduler" in out
    assert " of the block_allocator" not in out


def test_some_segments(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = list_segments(journal)[-1].number
    for asked, count in (("2", 1), ("2-", last - 1), ("1-2", 2), (f"{last}-", 1)):
        code, out, err = replay(capsys, str(journal), "--segment", asked)
        assert code == 0, out
        assert f"{count} segment{'s' * (count > 1)} in" in err


def test_a_difference_shows_both_messages_and_where(
    journal: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "make_plan", lambda _state, _settings: None)
    code, out, _ = replay(capsys, str(journal))
    assert code == 1
    first, *rest = out.splitlines()
    assert first.startswith("Differs: scheduler, segment 1, byte ")
    assert any(line.startswith("  told      ") for line in rest)
    assert any(line.startswith("  recorded  to block_allocator: PlanBlocks(") for line in rest)
    assert any(line.startswith("  replayed  ") for line in rest)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ((), "required: DIR"),
        (("{nowhere}",), "cannot be read"),
        (("{journal}", "--segment", "99"), "there is no segment '99', only 1 to "),
        (("{journal}", "--segment", "x"), "'x' is no number, nor such as 3- or 3-7"),
        (("{journal}", "--segment", "3-2"), "there is no segment '3-2'"),
        (("{journal}", "--actor", "producer"), "'producer' is none of scheduler"),
        (("{journal}", "--actor", "swa_cache_manager"), "swa_cache_manager was not recorded"),
        (("{journal}", "--actor", "tokenizer"), "--actor tokenizer needs --model"),
        (("{journal}", "--sgement", "1"), "did you mean --segment?"),
        (("{journal}", "--model", "{journal}"), "config.json"),
    ],
)
def test_wrong_usage(
    journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], text: str
) -> None:
    places = {"journal": journal, "nowhere": tmp_path / "nowhere"}
    code, _, err = replay(capsys, *(argument.format(**places) for argument in argv))
    assert code in (2, 3)
    assert text in err.splitlines()[-1]


def test_another_model_is_refused(journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tiny_llama_dir(tmp_path)
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    code, _, err = replay(capsys, str(journal), "--model", str(other))
    assert code == 2
    assert "is not the model that was recorded" in err


def test_a_flipped_byte_is_exit_code_2(
    journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for segment in list_segments(journal):
        (tmp_path / segment.path.name).write_bytes(segment.path.read_bytes())
    broken = tmp_path / list_segments(journal)[1].path.name
    data = bytearray(broken.read_bytes())
    data[len(data) // 2] ^= 16
    broken.write_bytes(data)
    code, out, err = replay(capsys, str(tmp_path))
    assert code == 2
    assert out == ""
    assert f"{broken}: damaged at byte " in err


def test_long_messages_are_cut_short() -> None:
    assert shortened("x" * 10) == "x" * 10
    long = "x" * 5 * MAX_SHOWN_CHARS + "HERE" + "y" * 5 * MAX_SHOWN_CHARS
    assert len(shortened(long)) < MAX_SHOWN_CHARS + 100
    shown = shortened(long, long.index("HERE"))
    assert len(shown) < MAX_SHOWN_CHARS + 100
    assert "xHEREy" in shown
    assert shortened(long, 10**9).endswith("y")
