"""Recorded workloads, told apart by what is in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from ksana.errors import ConfigError
from simulations.requests import SimRequest
from simulations.workloads.azure import HEADER, read_azure
from simulations.workloads.lines import read_lines
from simulations.workloads.mooncake import read_mooncake
from simulations.workloads.recorded import read_journal
from simulations.workloads.token_lines import read_token_lines


class _Keys(msgspec.Struct):
    """What tells the forms of JSON lines apart."""

    hash_ids: object = None
    input_toks: object = None


def read_trace(path: Path) -> Iterator[SimRequest]:
    """Requests by arrival. Raises ConfigError: no file or no known form; a wrong line, when it is met."""
    if path.is_dir():
        return read_journal(path)
    line = next(read_lines(path), None)
    if line is None:
        raise ConfigError(f"{path} is empty")
    if line.text.removeprefix(b"\xef\xbb\xbf") == HEADER:
        return read_azure(path)
    try:
        keys = msgspec.json.decode(line.text, type=_Keys)
    except (msgspec.DecodeError, RecursionError):
        keys = _Keys()
    if keys.hash_ids is not None:
        return read_mooncake(path)
    if keys.input_toks is not None:
        return read_token_lines(path)
    raise line.wrong(
        "neither a Mooncake trace (hash_ids), nor a workload.jsonl (input_toks), nor an Azure trace "
        f"({HEADER.decode()})"
    )
