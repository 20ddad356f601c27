"""Recorded workloads: read as they were written, and hostile files refused with their line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ksana.errors import ConfigError
from simulations.requests import SimRequest
from simulations.workloads import lines
from simulations.workloads.trace_files import read_trace

MOONCAKE = {"timestamp": 3000, "input_length": 1100, "output_length": 1, "hash_ids": [4, 5, 6]}
TOKENS = {"input_toks": 3, "output_toks": 7, "arrival_time_ns": 2_500_000_000, "input_tok_ids": [9, 8, 7]}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def read(tmp_path: Path, text: str | bytes) -> list[SimRequest]:
    path = tmp_path / "trace"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return list(read_trace(path))


def test_mooncake(tmp_path: Path) -> None:
    other = MOONCAKE | {"timestamp": 4000, "input_length": 1024, "output_length": 9, "hash_ids": [4, 7]}
    first, second = read(tmp_path, f"{json.dumps(MOONCAKE)}\n\n{json.dumps(other)}")
    assert (first.arrival_s, second.arrival_s) == (3.0, 4.0)
    assert (first.max_tokens, second.max_tokens) == (1, 9)
    one, two = first.prompt.token_ids(), second.prompt.token_ids()
    assert (len(one), len(two)) == (1100, 1024)
    assert one[:512] == two[:512]
    assert one[512] != two[512]


def test_token_lines(tmp_path: Path) -> None:
    unlisted = {"input_toks": 5, "output_toks": 1, "arrival_time_ns": 3_000_000_000}
    first, second = read(tmp_path, f"{json.dumps(TOKENS)}\n{json.dumps(unlisted)}")
    assert (first.arrival_s, first.max_tokens, first.prompt.token_ids()) == (2.5, 7, (9, 8, 7))
    assert (second.arrival_s, second.prompt.num_tokens) == (3.0, 5)


def test_azure_begins_at_nought_and_shares_nothing(tmp_path: Path) -> None:
    text = AZURE + "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:16:46.6805900,374,109\r\n"
    first, second = read(tmp_path, text)
    assert (first.arrival_s, second.arrival_s) == (0.0, 60.0)
    assert (first.max_tokens, second.max_tokens) == (44, 109)
    assert first.prompt.token_ids()[0] != second.prompt.token_ids()[0]


def changed(record: dict[str, object], **fields: object) -> str:
    """A good line, and a second that differs in these."""
    return f"{json.dumps(record)}\n{json.dumps(record | fields)}"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "is empty"),
        ("{}", "line 1: neither"),
        ("[" * 100_000, "line 1: neither"),
        ("\xff\xfe", "line 1: neither"),
        (json.dumps(MOONCAKE) + "\n" + "[" * 100_000, "line 2"),
        (json.dumps(MOONCAKE) + '\n{"timestamp": 1e999}', "line 2"),
        (changed(MOONCAKE, timestamp=2999), "line 2: arrives before"),
        (changed(MOONCAKE, timestamp="now"), "line 2"),
        (changed(MOONCAKE, hash_ids=[1, 2]), "line 2: 1100 tokens are 3 blocks"),
        (changed(MOONCAKE, hash_ids=[1, 2, -3]), "line 2: hash_ids go from 0"),
        (changed(MOONCAKE, hash_ids=[1, 2, 1 << 40]), "line 2: hash_ids go from 0"),
        (changed(MOONCAKE, input_length=0, hash_ids=[]), "line 2: input_length is"),
        (changed(MOONCAKE, input_length=1 << 60, hash_ids=[1]), "line 2: input_length is"),
        (changed(MOONCAKE, output_length=0), "line 2: output_length is 0, not from 1"),
        (changed(MOONCAKE, output_length=True), "line 2"),
        (changed(TOKENS, output_toks=0), "line 2: output_toks is 0, not from 1"),
        (AZURE + "2023-11-16 18:15:46,5,0", "line 2: GeneratedTokens is 0, not from 1"),
        (AZURE + "2023-11-16 18:15:46,0,5", "line 2: ContextTokens is 0, not from 1"),
        (changed(MOONCAKE, output_length=-1), "line 2: output_length is -1, not from 1"),
        (changed(TOKENS, input_toks=4), "line 2: input_toks is 4, but there are 3"),
        (changed(TOKENS, input_tok_ids=[1, 2, 1 << 31]), "line 2"),
        (changed(TOKENS, arrival_time_ns=-1), "line 2: no request can arrive"),
        (AZURE + "2023-11-16 18:15:46,1", "line 2: not a timestamp"),
        (AZURE + "2023-11-16 18:15:46,1,-1", "line 2: not a timestamp"),
        (AZURE + "2023-11-16 18:15:46,1," + "9" * 10_000, "line 2: not a timestamp"),
        (AZURE + "2023-11-16 18:15:46,1,1\n2023-11-16 18:15:47+00:00,1,1", "line 3: not a timestamp"),
        (AZURE + "2023-11-16 18:15:46,0,1", "line 2: "),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read(tmp_path, text.encode("latin-1"))


def test_no_more_of_a_line_is_read_than_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1 << 20)
    with pytest.raises(ConfigError, match="line 1: longer than 1 MiB"):
        read(tmp_path, b" " * (2 << 20))


@pytest.mark.parametrize("name", ["missing", "trace/below"])
def test_what_cannot_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / name)
