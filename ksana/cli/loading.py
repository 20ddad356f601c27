"""Progress while a model loads: a bar that moves in a terminal, a line now and then anywhere else."""

from __future__ import annotations

from typing import TextIO

from ksana.cli.report import progress_bar

EVERY_SHARE = 0.25
"""Outside a terminal: a line for each quarter."""


class LoadingBar:
    """Draws on `stream`. Call it with how much is loaded and how much there is; `finish` ends the line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._shown_share = -1.0
        self._is_open = False

    def __call__(self, done: int, total: int) -> None:
        share = done / total if total > 0 else 1.0
        if self._is_terminal:
            self._stream.write(f"\r\x1b[KLoading  {progress_bar(done, total)}")
            self._is_open = True
        elif share >= 1 > self._shown_share or share >= self._shown_share + EVERY_SHARE:
            self._stream.write(f"Loading  {progress_bar(done, total)}\n")
        else:
            return
        self._shown_share = share
        self._stream.flush()

    def say(self, text: str) -> None:
        """A line of its own, such as that a file is being fetched."""
        self.finish()
        self._stream.write(text + "\n")
        self._stream.flush()

    def finish(self) -> None:
        if self._is_open:
            self._stream.write("\n")
            self._stream.flush()
            self._is_open = False
