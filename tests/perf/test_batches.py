"""What a configuration and a batch file may say, and how it is said where they are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ksana.errors import ConfigError
from ksana.perf.batches import Batch, PerfConfig, read_batches, read_config, write_batches
from ksana.perf.result import RequestGroup


def write(tmp_path: Path, content: Any) -> Path:
    file = tmp_path / "file.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def refused(tmp_path: Path, content: Any) -> str:
    """What is said of a batch file; always one line that names the file."""
    file = write(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        read_batches(file)
    text = str(caught.value)
    assert text.startswith(f"{file}: ")
    assert "\n" not in text
    assert len(text) < 500
    return text.removeprefix(f"{file}: ")


def one_batch(**request: Any) -> dict[str, Any]:
    return {"batches": [{"name": "b", "requests": [request]}]}


def groups(*entries: tuple[int, int, int]) -> tuple[RequestGroup, ...]:
    return tuple(
        RequestGroup(sequence_len=length, forwarding_token_num=computed, request_num=num)
        for length, computed, num in entries
    )


def test_a_configuration_has_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, {"batch_config_file": "sub/batches.json"})
    assert read_config(file) == PerfConfig(
        batch_config_file=tmp_path / "sub" / "batches.json",
        output_file=tmp_path / "model_perf_result.json",
        warmup_rounds=2,
        stat_rounds=10,
        seed=42,
    )


def test_a_configuration_says_everything(tmp_path: Path) -> None:
    content = {
        "batch_config_file": "/elsewhere/b.json",
        "output_file": "/there/r.json",
        "warmup_rounds": 0,
        "stat_rounds": 1,
        "seed": 2**64 - 1,
    }
    config = read_config(write(tmp_path, content))
    assert config.batch_config_file == Path("/elsewhere/b.json")
    assert config.output_file == Path("/there/r.json")
    assert (config.warmup_rounds, config.stat_rounds, config.seed) == (0, 1, 2**64 - 1)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ({}, "batch_config_file: is missing"),
        ({"batch_config_file": "b", "seeds": 1}, "'seeds': unknown key"),
        ({"batch_config_file": 3}, "batch_config_file: must be a text of one line, not 3"),
        ({"batch_config_file": ""}, "batch_config_file: must be a text"),
        ({"batch_config_file": "a\u0000b"}, "batch_config_file: must be a text"),
        ({"batch_config_file": "b", "stat_rounds": 0}, "stat_rounds: must be a whole number from 1"),
        ({"batch_config_file": "b", "warmup_rounds": -1}, "warmup_rounds: must be a whole number from 0"),
        ({"batch_config_file": "b", "seed": 2**64}, "seed: must be a whole number"),
        ({"batch_config_file": "b", "seed": 1.0}, "seed: must be a whole number"),
        ({"batch_config_file": "b", "seed": True}, "seed: must be a whole number .* not true"),
        ({"batch_config_file": "b", "output_file": None}, "output_file: must be a text .* not null"),
        ([], "must be an object with batch_config_file, not a list"),
        ("{", "is not JSON"),
        ('{"seed": NaN, "batch_config_file": "b"}', "NaN is no number"),
        ('{"seed": 1, "seed": 2, "batch_config_file": "b"}', "the key 'seed' stands twice"),
        ("[" * 100_000, "is nested too deeply"),
        ("\udcff".encode("utf-8", "surrogateescape").decode("latin-1") + "{}", "is not JSON"),
    ],
)
def test_a_configuration_is_refused(tmp_path: Path, content: Any, what: str) -> None:
    file = write(tmp_path, content)
    with pytest.raises(ConfigError, match=what) as caught:
        read_config(file)
    assert str(caught.value).startswith(str(file))
    assert caught.value.exit_code == 2


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.json: cannot be read: No such file"):
        read_config(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="cannot be read: it is a directory"):
        read_batches(tmp_path)
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ConfigError, match="is larger than"):
        read_batches(large)


def test_batches(tmp_path: Path) -> None:
    content = {
        "batches": [
            {
                "name": "first",
                "requests": [{"sequence_len": 100, "forwarding_token_num": 1, "request_num": 8}],
            },
            {
                "name": "second",
                "requests": [
                    {"sequence_len": 64, "forwarding_token_num": 64},
                    {"sequence_len": 9, "forwarding_token_num": 1},
                ],
            },
        ]
    }
    first, second = read_batches(write(tmp_path, content))
    assert (first.name, first.groups, first.layer_forward_round) == ("first", groups((100, 1, 8)), 1)
    assert second.groups == groups((64, 64, 1), (9, 1, 1))
    assert second.requests == [(64, 64), (9, 1)]
    shape = first.shape()
    assert (shape.num_requests, shape.num_prefills, shape.num_decodes) == (8, 0, 8)
    assert (shape.num_forwarding_tokens, shape.num_kv_tokens) == (8, 792)
    shape = second.shape()
    assert (shape.num_requests, shape.num_prefills, shape.num_decodes) == (2, 1, 1)
    assert (shape.num_forwarding_tokens, shape.num_kv_tokens) == (65, 8)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ({"batches": []}, "batches: must hold 1 to 10000 batches, not 0"),
        ({"batches": {}}, "batches: must be a list of batches, not an object"),
        ({}, "batches: is missing"),
        (None, "must be an object with batches, not null"),
        ({"batches": [3]}, "batches[0]: must be an object with name, requests, not 3"),
        ({"batches": [{"requests": []}]}, "batches[0]: name: is missing"),
        ({"batches": [{"name": "b"}]}, "batch 'b': requests: is missing"),
        ({"batches": [{"name": "b", "requests": []}]}, "batch 'b': requests: must hold 1 to 4096"),
        ({"batches": [{"name": "b", "request": []}]}, "batch 'b': 'request': unknown key"),
        ({"batches": [{"name": 7, "requests": []}]}, "batches[0]: name: must be a text of one line, not 7"),
        (
            {"batches": [{"name": "b", "requests": [1]}]},
            "batch 'b': requests[0]: must be an object with forwarding_token_num, sequence_len, not 1",
        ),
        (one_batch(sequence_len=5), "batch 'b': requests[0]: forwarding_token_num: is missing"),
        (
            one_batch(sequence_len=5, forwarding_token_num=6),
            "batch 'b': requests[0]: forwarding_token_num: is 6, more than the sequence_len of 5",
        ),
        (one_batch(sequence_len=5, forwarding_token_num=0), "forwarding_token_num: must be a whole number"),
        (one_batch(sequence_len="5", forwarding_token_num=1), "sequence_len: must be a whole number"),
        (one_batch(sequence_len=1e30, forwarding_token_num=1), "sequence_len: must be a whole number"),
        (one_batch(sequence_len=10**30, forwarding_token_num=1), "sequence_len: must be a whole number"),
        (one_batch(sequence_len=5, forwarding_token_num=1, request_num=0), "request_num: must be a whole"),
        (one_batch(sequence_len=5, forwarding_token_num=1, request_num=5000), "request_num: must be a whole"),
        (one_batch(sequence_len=5, forwarding_token_num=1, x=1), "requests[0]: 'x': unknown key"),
        ({"batches": [], "batch_0": {}}, "'batch_0': unknown key"),
        ("1" * 10_000, "is not JSON as expected"),
    ],
)
def test_batches_are_refused(tmp_path: Path, content: Any, what: str) -> None:
    assert what in refused(tmp_path, content)


def test_the_older_form(tmp_path: Path) -> None:
    request = {"sequence_len": 10, "forwarding_token_num": 2}
    content = {
        "batch_10": {"dp_0": [request]},
        "batch_2": {"dp_0": [{**request, "request_num": 3}], "layer_forward_round": 5},
    }
    second, tenth = read_batches(write(tmp_path, content))
    assert (second.name, second.groups, second.layer_forward_round) == ("batch_2", groups((10, 2, 3)), 5)
    assert (tenth.name, tenth.groups, tenth.layer_forward_round) == ("batch_10", groups((10, 2, 1)), 1)
    content["layer_forward_round"] = 4  # type: ignore[assignment]
    assert [batch.layer_forward_round for batch in read_batches(write(tmp_path, content))] == [5, 4]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ({"batch_0": {}}, "batch 'batch_0': dp_0: is missing"),
        ({"batch_0": {"dp_0": []}}, "batch 'batch_0': dp_0: must hold 1 to 4096 requests, not 0"),
        ({"batch_0": {"dp_0": [{"sequence_len": 1}]}}, "batch 'batch_0': dp_0[0]: forwarding_token_num"),
        ({"batch_0": {"dp_0": [], "dp_1": []}}, "batch 'batch_0': dp_1: data parallelism is not built"),
        ({"batch_0": {"dp_3": []}}, "batch 'batch_0': dp_3: data parallelism is not built"),
        ({"batch_0": {"dp_0": [], "x": 1}}, "batch 'batch_0': 'x': unknown key"),
        ({"batch_0": [], "other": 1}, "'other': unknown key"),
        ({"batch_0": []}, "batch 'batch_0': must be an object with dp_0, not a list"),
        (
            {"batch_0": {"dp_0": [{"sequence_len": 2, "forwarding_token_num": 1}], "layer_forward_round": 0}},
            "batch 'batch_0': layer_forward_round: must be a whole number from 1",
        ),
        ({"batch_0": {}, "batch_٣": {}}, "unknown key"),
    ],
)
def test_the_older_form_is_refused(tmp_path: Path, content: Any, what: str) -> None:
    assert what in refused(tmp_path, content)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    batches = [
        Batch(name="a", place=("batch 'a'",), groups=groups((10, 1, 2), (7, 7, 1))),
        Batch(name="b", place=("batch 'b'",), groups=groups((3, 2, 1))),
    ]
    write_batches(tmp_path / "b.json", batches)
    assert read_batches(tmp_path / "b.json") == batches


def test_a_batch_has_a_bounded_number_of_requests(tmp_path: Path) -> None:
    group = {"sequence_len": 10, "forwarding_token_num": 1, "request_num": 4096}
    file = tmp_path / "batches.json"
    file.write_text(json.dumps({"batches": [{"name": "most", "requests": [group]}]}))
    assert len(read_batches(file)[0].requests) == 4096
    file.write_text(json.dumps({"batch_0": {"dp_0": [group] * 4096}}))
    with pytest.raises(ConfigError, match="batch 'batch_0': request_num: makes 16777216 requests"):
        read_batches(file)
