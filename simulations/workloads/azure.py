"""Azure LLM inference traces: a CSV of TIMESTAMP, ContextTokens, GeneratedTokens.

What was asked is not recorded: every prompt is a text of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from ksana.errors import ConfigError
from simulations.requests import MAX_CONTENT_ID, NamedText, PromptSource, SimRequest
from simulations.workloads.lines import Arrivals, check_lengths, read_lines

HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"


def read_azure(path: Path) -> Iterator[SimRequest]:
    """The first request arrives at 0. Raises ConfigError, with the line, for what is no such trace."""
    lines = read_lines(path)
    header = next(lines, None)
    if header is None or header.text.removeprefix(b"\xef\xbb\xbf") != HEADER:
        raise ConfigError(f"{path}: an Azure trace begins with {HEADER.decode()}")
    arrivals = Arrivals()
    start: datetime | None = None
    for line in lines:
        try:
            timestamp, context, generated = line.text.decode("ascii").split(",")
            arrival = datetime.fromisoformat(timestamp)
            num_input, num_output = _number(context), _number(generated)
            start = start or arrival
            arrival_s = (arrival - start).total_seconds()
        except (ValueError, TypeError):
            raise line.wrong("not a timestamp and two numbers of tokens") from None
        arrivals.check(line, arrival_s)
        check_lengths(line, ContextTokens=num_input, GeneratedTokens=num_output)
        if line.number > MAX_CONTENT_ID:
            raise line.wrong("too many lines")
        yield SimRequest(
            arrival_s=arrival_s,
            prompt=PromptSource((NamedText(line.number, num_input),)),
            max_tokens=num_output,
        )


def _number(text: str) -> int:
    if len(text) > 12 or not text.isascii() or not text.isdigit():
        raise ValueError(text)
    return int(text)
