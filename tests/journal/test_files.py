"""Segments on the disk: bounded, locked, and given up without harm when the disk fails."""

from __future__ import annotations

import errno
import io
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from ksana.config import Settings
from ksana.errors import ConfigError
from ksana.journal import files as files_module
from ksana.journal import recorder as recorder_module
from ksana.journal.files import Piece, SegmentFiles
from ksana.journal.format import segment_name
from ksana.journal.journal import Journal, open_journal, recorded_actors
from ksana.journal.reading import list_segments
from ksana.journal.replay import replay
from tests.journal.recording import ACTORS, record


def test_the_oldest_segments_go_and_the_rest_replays(tmp_path: Path) -> None:
    record(tmp_path, num_requests=120, segment_bytes=64 << 10, max_bytes=512 << 10)
    segments = list_segments(tmp_path)
    assert segments[0].number > 1
    assert sum(segment.path.stat().st_size for segment in segments) <= 512 << 10
    assert replay(segments, ACTORS).difference is None


def test_another_run_goes_on_counting(tmp_path: Path) -> None:
    record(tmp_path, seed=1, num_requests=20)
    first = list_segments(tmp_path)
    record(tmp_path, seed=2, num_requests=20)
    both = list_segments(tmp_path)
    assert [s.number for s in both] == list(range(1, len(both) + 1))
    assert len({s.header.run for s in both}) == 2
    assert len(both) > len(first)
    assert replay(both, ACTORS).difference is None


def test_one_process_at_a_time(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path, 1 << 20)
    with pytest.raises(ConfigError, match="another process writes its journal there"):
        SegmentFiles(tmp_path, 1 << 20)
    files.close()
    SegmentFiles(tmp_path, 1 << 20).close()


def test_what_cannot_be_written_is_told_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        SegmentFiles(tmp_path / "file" / "below", 1 << 20)
    (tmp_path / segment_name(99_999_999)).write_bytes(b"")
    with pytest.raises(ConfigError, match="no numbers left"):
        SegmentFiles(tmp_path, 1 << 20)


def test_files_are_for_the_owner_only_and_never_overwritten(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path / "journal", 1 << 20)
    files.write([Piece(1, b"abc"), Piece(1, b"def"), Piece(2, b"g")])
    assert (tmp_path / "journal" / segment_name(1)).read_bytes() == b"abcdef"
    for path in (tmp_path / "journal").iterdir():
        assert path.stat().st_mode & 0o077 == 0
    (tmp_path / "journal" / segment_name(3)).write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        files.write([Piece(3, b"x")])
    files.close()


def test_together_they_never_have_more_than_they_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    totals: list[int] = []

    class Watched(io.FileIO):
        def write(self, data: Any) -> int:
            num_bytes = super().write(data)
            totals.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
            return num_bytes

    monkeypatch.setattr(files_module.io, "FileIO", Watched)
    record(tmp_path, num_requests=60, segment_bytes=64 << 10, max_bytes=150_000)
    assert list_segments(tmp_path)[0].number > 1
    assert 100_000 < max(totals) <= 150_000

    files = SegmentFiles(tmp_path, 150_000)
    number = files.next_number
    with pytest.raises(OSError, match="one segment has more than all may have, 150000 bytes"):
        files.write([Piece(number, bytes(150_000)), Piece(number, b"x")])
    files.close()
    assert [path.name for path in tmp_path.glob("*.ksj")] == [segment_name(number)]


def test_what_was_not_written_when_a_task_was_cancelled_is_written_at_the_end(tmp_path: Path) -> None:
    """The last batch waits for a thread while the engine ends."""
    pieces = iter([[Piece(1, b"a")], [Piece(1, b"b")], []])
    recorder: Any = SimpleNamespace(take=lambda: next(pieces), end=lambda: None, stop=pytest.fail)

    async def main() -> None:
        journal = Journal(recorder, SegmentFiles(tmp_path, 1 << 20))
        limiter = trio.to_thread.current_default_thread_limiter()
        with trio.CancelScope() as scope:
            for number in range(int(limiter.total_tokens)):
                limiter.acquire_on_behalf_of_nowait(number)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(journal.run)
                while not limiter.statistics().tasks_waiting:  # noqa: ASYNC110
                    await trio.sleep(0.01)
                scope.cancel()
        for number in range(int(limiter.total_tokens)):
            limiter.release_on_behalf_of(number)
        await journal.aclose()

    trio.run(main)
    assert (tmp_path / segment_name(1)).read_bytes() == b"ab"


def test_a_disk_that_fails_ends_the_journal_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = SegmentFiles.write
    writes = 0

    def full(self: SegmentFiles, pieces: Any) -> None:
        nonlocal writes
        writes += 1
        if writes == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, pieces)

    monkeypatch.setattr(SegmentFiles, "write", full)
    with caplog.at_level(logging.ERROR):
        run = record(tmp_path, num_requests=40, is_stopped=True)
    assert run.num_ended == 40
    assert run.stopped is not None
    assert "No space left on device" in run.stopped
    assert "serving goes on" in caplog.text
    report = replay(list_segments(tmp_path), ACTORS)
    assert report.difference is None
    assert any("ends without an end" in note for note in report.notes)


def test_a_disk_that_is_too_slow_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MAX_UNWRITTEN_BYTES", 50_000)
    monkeypatch.setattr("ksana.journal.journal.WRITE_EVERY_S", 1e9)
    run = record(tmp_path, num_requests=40, is_stopped=True)
    assert run.num_ended == 40
    assert run.stopped is not None
    assert "wait for the disk" in run.stopped


def test_a_bug_in_the_journal_is_no_reason_to_stop_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_arguments: object) -> bytes:
        raise RuntimeError("a bug")

    monkeypatch.setattr("ksana.journal.recorder.redacted_state", broken)
    run = record(tmp_path, num_requests=10, redaction_key=bytes(32), is_stopped=True)
    assert run.num_ended == 10
    assert run.stopped == "RuntimeError while recording"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"journal_actors": ("scheduler", "nobody")}, "each one of tokenizer, scheduler"),
        ({"journal_actors": ("tokenizer",), "journal_redact": True}, "hears and says text"),
        ({"journal_max_bytes": 100 << 20}, "must hold 2 segments"),
        ({"journal_actors": ("swa_cache_manager",)}, "this engine has no swa_cache_manager"),
        ({"journal_key_file": "k"}, "nothing is redacted"),
        ({"journal": ""}, "journal: '' will not do"),
        ({"journal": None, "journal_redact": True}, "journal_redact is set, but nothing is recorded"),
    ],
)
def test_settings_that_cannot_work(tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    recorded: Any = type("Recorded", (), {"cache": type("Cache", (), {"has_swa": False}), "loader": None})
    with pytest.raises(ConfigError, match=text):
        open_journal(
            Settings(model="m", **({"journal": str(tmp_path)} | settings)), recorded, model_fingerprint="f"
        )


def test_which_actors_are_recorded() -> None:
    plain = Settings(model="m", journal="d")
    assert recorded_actors(plain, has_swa=False, has_loader=False) == (
        "tokenizer",
        "scheduler",
        "block_allocator",
    )
    redacted = Settings(model="m", journal="d", journal_redact=True)
    assert recorded_actors(redacted, has_swa=True, has_loader=True) == ACTORS
    two = Settings(model="m", journal="d", journal_actors=("swa_cache_manager", "scheduler"))
    assert recorded_actors(two, has_swa=True, has_loader=True) == ("scheduler", "swa_cache_manager")


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777], ids=oct)
def test_all_of_it_is_for_the_owner_alone_under_any_umask(tmp_path: Path, umask: int) -> None:
    directory = tmp_path / "above" / "journal"
    before = os.umask(umask)
    try:
        files = SegmentFiles(directory, 1 << 20)
        files.write([Piece(1, b"x"), Piece(2, b"y")])
        files.close()
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o7777 for path in (directory.parent, directory)}
    assert modes == {"above": 0o700, "journal": 0o700}
    assert [path.stat().st_mode & 0o7777 for path in directory.iterdir()] == [0o600] * 3


def test_a_directory_that_others_may_read_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o755)
    SegmentFiles(tmp_path, 1 << 20).close()
    (line,) = caplog.messages
    assert "prompts are in it" in line
    assert "can be read by others on this machine (mode 0755)" in line
    tmp_path.chmod(0o700)
    SegmentFiles(tmp_path, 1 << 20).close()
    assert len(caplog.messages) == 1
