"""How long decodes of unequal KV lengths keep a device busy: a kernel's blocks on its processors.

Attention of decodes is one block of work for every row and KV head, as many blocks at a time as the device
has processors for, head after head. All blocks under way read at the same speed: their share of the memory's
bandwidth, but no faster than one processor alone can. So as long as many are under way, only the sum of all
lengths counts. Towards the end fewer are, and the rest of the bandwidth lies idle: that is the *tail*.

Where a batch has too few blocks to fill the device, such a kernel splits every row over several, and lengths
even out by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

import msgspec

_CACHED_STEPS = 32
"""A tail is computed once for so many tokens by which all rows of a batch grow: it changes slowly."""
_MAX_CACHED = 4096


class RowBlocks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one layer on one device."""

    heads: int
    """KV heads, and so blocks for each row."""
    slots: int
    """Blocks under way at the same time."""
    serial_us: float
    """Microseconds per token and head, of one block alone."""
    shared_us: float
    """The same with all blocks under way, of all together: what the memory's bandwidth allows."""
    split_below: int
    """Batches of fewer blocks are split further, and have no tail."""

    def are_split(self, num_rows: int) -> bool:
        return num_rows * self.heads < self.split_below


def last_spans(heads: int, slots: int, lengths: Sequence[float]) -> list[tuple[int, float]]:
    """(blocks under way, tokens that each of them goes on for), from when the last block begins to the end.
    About 0.3 µs per row and head.

    All blocks under way are equally fast, so which one ends when does not depend on how fast that is: blocks
    are handed out in the order of their progress.
    """
    num = len(lengths) * heads
    each = 1
    if num <= slots:
        ends, each = sorted(lengths), heads
    else:
        work = list(lengths) * heads
        ends = work[:slots]
        heapify(ends)
        for length in work[slots:]:
            heapreplace(ends, ends[0] + length)
        ends.sort()
    spans = []
    previous = 0.0
    for index, end in enumerate(ends):
        if end > previous:
            spans.append(((len(ends) - index) * each, end - previous))
            previous = end
    return spans


def idle_us(spans: Sequence[tuple[int, float]], serial_us: float, shared_us: float) -> float:
    """What of these spans goes by with bandwidth idle: they take that much longer than their sum."""
    most = serial_us / shared_us if shared_us else float("inf")
    return sum([(serial_us - active * shared_us) * tokens for active, tokens in spans if active < most])


def tail_us(blocks: RowBlocks, lengths: Sequence[float]) -> float:
    """What a layer's decodes of these KV lengths take beyond what their sum does."""
    spans = last_spans(blocks.heads, blocks.slots, lengths)
    return idle_us(spans, blocks.serial_us, blocks.shared_us)


def equal_tail_us(blocks: RowBlocks, num_rows: int, length: float) -> float:
    """The same for rows of one length: only the last round of blocks may leave processors idle."""
    num = num_rows * blocks.heads
    left = num % blocks.slots if num > blocks.slots else num
    return max(0.0, blocks.serial_us - left * blocks.shared_us) * length if left else 0.0


class Tails:
    """Tails of batches that grow by a token per row and step."""

    def __init__(self, blocks: RowBlocks) -> None:
        self.blocks = blocks
        self._known: dict[tuple[int, ...], float] = {}

    def microseconds(self, lengths: Sequence[int]) -> float:
        """The tail of a batch whose shortest row is the middle one of `_CACHED_STEPS` lengths."""
        shortest = min(lengths)
        around = shortest // _CACHED_STEPS
        key = (around, *[length - shortest for length in lengths])
        us = self._known.get(key)
        if us is None:
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            first = around * _CACHED_STEPS + _CACHED_STEPS / 2
            us = self._known[key] = tail_us(self.blocks, [first + more for more in key[1:]])
        return us
