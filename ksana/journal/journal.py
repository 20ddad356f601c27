"""The journal of an engine: a recorder, the files it goes to, and the task that takes it there."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from pathlib import Path

import trio

from ksana.config import Settings
from ksana.errors import ConfigError
from ksana.journal.files import Piece, SegmentFiles
from ksana.journal.format import RecordedSettings
from ksana.journal.recorder import Cores, JournalRecorder
from ksana.journal.redaction import Redaction
from ksana.journal.redaction_key import read_or_make_key
from ksana.runtime.actor import Address

log = logging.getLogger(__name__)

WRITE_EVERY_S = 0.2
"""What a killed process may lose."""
CLOSE_WITHIN_S = 5.0
"""How long a slow disk may hold up the end of an engine."""


class Journal:
    """Records from `begin` on, while `run` runs. A disk that fails or is too slow ends the journal, not the
    engine.

    Invariant: what was taken from the recorder is written in order and without a gap, whichever thread comes
    to it, or ends where the disk failed.
    """

    def __init__(self, recorder: JournalRecorder, files: SegmentFiles, *, threads: bool = True) -> None:
        """Without `threads` the disk is written in the event loop, as simulations need it."""
        self.recorder = recorder
        self._files = files
        self._threads = threads
        self._turn = threading.Lock()
        """Whoever has it writes: a thread may have been given up and still be at it when the end comes."""
        self._pending: deque[Piece] = deque()
        self._failed = False

    def begin(self, cores: Cores, now_s: float) -> None:
        """A generation begins; see `JournalRecorder.begin`."""
        self.recorder.begin(cores, now_s)

    async def run(self) -> None:
        """Write what was recorded, again and again, until cancelled."""
        while True:
            await trio.sleep(WRITE_EVERY_S)
            self._pending += self.recorder.take()
            if not self._pending:
                continue
            if self._threads:
                error = await trio.to_thread.run_sync(self._write, abandon_on_cancel=True)
            else:
                error = self._write()
            if error is not None:
                self.recorder.stop(error)

    async def aclose(self) -> None:
        """Write the end, in bounded time."""
        self.recorder.end()
        self._pending += self.recorder.take()
        if not self._threads:
            self._finish()
            return
        with trio.move_on_after(CLOSE_WITHIN_S, shield=True):
            await trio.to_thread.run_sync(self._finish, abandon_on_cancel=True)

    def _finish(self) -> None:
        error = self._write()
        if error is not None:
            log.error("the journal's end could not be written: %s", error)
        self._files.close()

    def _write(self) -> str | None:
        """Write what is pending. Returns why it could not be done, the first time, or None."""
        with self._turn:
            pieces = [self._pending.popleft() for _ in range(len(self._pending))]
            if self._failed:
                return None
            try:
                self._files.write(pieces)
            except OSError as error:
                self._failed = True
                return f"{self._files.directory}: {error.strerror}"
            except Exception as error:
                self._failed = True
                log.exception("a bug in the journal")
                return f"{type(error).__name__} while writing"
        return None


def recorded_actors(settings: Settings, *, has_swa: bool, has_loader: bool) -> tuple[Address, ...]:
    """The actors that the settings name, in the order of their layer. Raises ConfigError."""
    there: dict[Address, bool] = {
        "tokenizer": not settings.journal_redact,
        "scheduler": True,
        "block_allocator": True,
        "swa_cache_manager": has_swa,
        "remote_cache_loader": has_loader,
    }
    for name in settings.journal_actors:
        if not there[name]:
            raise ConfigError(f"journal_actors: this engine has no {name}")
    asked: tuple[Address, ...] = settings.journal_actors or tuple(there)
    return tuple(actor for actor, is_there in there.items() if is_there and actor in asked)


def open_journal(
    settings: Settings, recorded: RecordedSettings, *, model_fingerprint: str, threads: bool = True
) -> Journal | None:
    """The journal that the settings ask for, or None. Raises ConfigError."""
    if settings.journal is None:
        return None
    actors = recorded_actors(settings, has_swa=recorded.cache.has_swa, has_loader=recorded.loader is not None)
    redaction = None
    if settings.journal_redact:
        key = read_or_make_key(settings.journal_key_file)
        redaction = Redaction(key, recorded.cache, recorded.vocab_size)
    files = SegmentFiles(Path(settings.journal), settings.journal_max_bytes)
    recorder = JournalRecorder(
        settings=recorded,
        model_fingerprint=model_fingerprint,
        actors=actors,
        run=secrets.token_hex(8),
        first_segment=files.next_number,
        segment_bytes=settings.journal_segment_bytes,
        redaction=redaction,
    )
    return Journal(recorder, files, threads=threads)
