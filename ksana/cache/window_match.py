"""The Continuous Window Condition: where a request may start so that every token sees its whole window."""

from __future__ import annotations

from collections.abc import Iterable


def last_valid_end(valid: Iterable[bool], sliding_window_blocks: int, *, window_open_at_start: bool) -> int:
    """The largest endpoint (number of leading blocks, exclusive end), 0 if there is none.

    An endpoint is valid if and only if the last `sliding_window_blocks` blocks before it all have a valid
    SWA block. With `window_open_at_start` as many valid blocks are thought to stand before the sequence: a
    token near the start sees fewer tokens than a window, and none of them is missing.
    """
    last_swa_valid_idx = 0
    swa_valid_in_window = sliding_window_blocks if window_open_at_start else 0
    for idx, is_valid in enumerate(valid):
        swa_valid_in_window = swa_valid_in_window + 1 if is_valid else 0
        if swa_valid_in_window >= sliding_window_blocks:
            last_swa_valid_idx = idx + 1
    return last_swa_valid_idx


def registered_blocks(last_swa_valid_idx: int, sliding_window_blocks: int) -> range:
    """The blocks that a request which starts at this endpoint counts on: one window before it."""
    return range(max(0, last_swa_valid_idx - sliding_window_blocks), last_swa_valid_idx)
