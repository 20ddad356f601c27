"""Mooncake traces: JSON lines of timestamp (ms), input_length, output_length and hash_ids.

Each hash id stands for 512 tokens of the prompt, the last one perhaps for fewer; equal ids are equal text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from simulations.requests import MAX_CONTENT_ID, NamedText, PromptSource, SimRequest
from simulations.workloads.lines import Arrivals, check_lengths, read_json_lines

MOONCAKE_BLOCK = 512
"""Tokens that one hash id stands for."""


class MooncakeLine(msgspec.Struct, gc=False):
    timestamp: float
    """Milliseconds since the trace began."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def mooncake_lines(path: Path) -> Iterator[MooncakeLine]:
    """The requests of a trace. Raises ConfigError, with the line, for anything else."""
    arrivals = Arrivals()
    for line, request in read_json_lines(path, MooncakeLine):
        arrivals.check(line, request.timestamp / 1000)
        check_lengths(line, input_length=request.input_length, output_length=request.output_length)
        num_blocks = -(-request.input_length // MOONCAKE_BLOCK)
        if len(request.hash_ids) != num_blocks:
            raise line.wrong(
                f"{request.input_length} tokens are {num_blocks} blocks of {MOONCAKE_BLOCK}, "
                f"but there are {len(request.hash_ids)} hash_ids"
            )
        if min(request.hash_ids) < 0 or max(request.hash_ids) > MAX_CONTENT_ID:
            raise line.wrong(f"hash_ids go from 0 to {MAX_CONTENT_ID}")
        yield request


def read_mooncake(path: Path) -> Iterator[SimRequest]:
    """The trace at full scale; no ids are made before a request arrives."""
    for line in mooncake_lines(path):
        ids = line.hash_ids
        num_last = line.input_length - MOONCAKE_BLOCK * (len(ids) - 1)
        parts = [NamedText(content_id, MOONCAKE_BLOCK) for content_id in ids[:-1]]
        yield SimRequest(
            arrival_s=line.timestamp / 1000,
            prompt=PromptSource((*parts, NamedText(ids[-1], num_last))),
            max_tokens=line.output_length,
        )
