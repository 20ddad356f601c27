"""The progress bar of a measurement, on stderr."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from ksana.cli.loading import LoadingBar


class RoundsBar:
    """The progress of all rounds on stderr. Begins with the first: loading the model has a bar of its own."""

    def __init__(self, loading: LoadingBar, num_batches: int, rounds_per_batch: int) -> None:
        self._loading = loading
        self._num_rounds = num_batches * rounds_per_batch
        self._rounds_per_batch = rounds_per_batch
        self._bar: Any = None

    def __enter__(self) -> RoundsBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, num_batches_done: int, name: str, num_done: int) -> None:
        """So many batches are done, and so many rounds of the next."""
        if self._bar is None:
            self._loading.finish()
            self._bar = tqdm(
                total=self._num_rounds,
                unit="round",
                file=sys.stderr,
                mininterval=0.2 if sys.stderr.isatty() else 5.0,
                dynamic_ncols=True,
            )
        if num_done == 1:
            self._bar.set_description(name[:40], refresh=False)
        self._bar.update(num_batches_done * self._rounds_per_batch + num_done - self._bar.n)
