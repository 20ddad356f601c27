"""What is to be measured: `model_perf_config.json`, and the batch file that it names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from ksana.atomic_file import write_atomically
from ksana.perf.json_file import Place, read_json, shown
from ksana.perf.result import MAX_REQUESTS, MAX_TOKENS, BatchShape, RequestGroup

MAX_BATCHES = 10_000
MAX_ROUNDS = 100_000
MAX_LAYER_ROUNDS = 1000
DEFAULT_OUTPUT = "model_perf_result.json"
DEFAULT_SEED = 42


class PerfConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Relative paths count from the directory of the file they stand in."""

    batch_config_file: Path
    output_file: Path
    warmup_rounds: int = 2
    stat_rounds: int = 10
    seed: int = DEFAULT_SEED


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One fixed step. `place` names it in errors: file, and name or number."""

    name: str
    place: tuple[str, ...]
    groups: tuple[RequestGroup, ...]
    layer_forward_round: int = 1

    @property
    def requests(self) -> list[tuple[int, int]]:
        """(sequence length, tokens computed in a round) of each request."""
        return [
            (group.sequence_len, group.forwarding_token_num)
            for group in self.groups
            for _ in range(group.request_num)
        ]

    def shape(self) -> BatchShape:
        requests = self.requests
        num_forwarding = sum(forwarding for _, forwarding in requests)
        return BatchShape(
            requests=self.groups,
            num_requests=len(requests),
            num_prefills=sum(forwarding > 1 for _, forwarding in requests),
            num_decodes=sum(forwarding == 1 for _, forwarding in requests),
            num_forwarding_tokens=num_forwarding,
            num_kv_tokens=sum(length for length, _ in requests) - num_forwarding,
        )


def read_config(file: Path) -> PerfConfig:
    """Raises ConfigError that names file and field."""
    place = Place(file)
    keys = ("batch_config_file", "output_file", "warmup_rounds", "stat_rounds", "seed")
    table = place.table(read_json(file), keys, ("batch_config_file",))
    return PerfConfig(
        batch_config_file=file.parent / place.text(table, "batch_config_file"),
        output_file=file.parent / place.text(table, "output_file", DEFAULT_OUTPUT),
        warmup_rounds=place.integer(table, "warmup_rounds", 0, MAX_ROUNDS, 2),
        stat_rounds=place.integer(table, "stat_rounds", 1, MAX_ROUNDS, 10),
        seed=place.integer(table, "seed", 0, 2**64 - 1, DEFAULT_SEED),
    )


def read_batches(file: Path) -> list[Batch]:
    """The batches of a file in either form, in order. Raises ConfigError that names file, batch and field."""
    content = read_json(file)
    place = Place(file)
    if isinstance(content, dict) and "batches" not in content and any(map(_is_older_key, content)):
        return _read_older(place, content)
    table = place.table(content, ("batches",), ("batches",))
    entries = place.inner("batches").items(table["batches"], "batches", MAX_BATCHES)
    return [_read_batch(place, number, entry) for number, entry in enumerate(entries)]


def _read_batch(file: Place, number: int, entry: object) -> Batch:
    path = (f"batches[{number}]",)
    if isinstance(entry, dict) and isinstance(entry.get("name"), str):
        path = (f"batch {shown(entry['name'])}",)
    place = file.inner(*path)
    table = place.table(entry, ("name", "requests"), ("name", "requests"))
    return Batch(
        name=place.text(table, "name"), place=path, groups=_read_groups(place, "requests", table["requests"])
    )


def _read_groups(batch: Place, key: str, value: object) -> tuple[RequestGroup, ...]:
    entries = batch.inner(key).items(value, "requests", MAX_REQUESTS)
    groups = tuple(
        _read_group(batch.inner(f"{key}[{number}]"), entry) for number, entry in enumerate(entries)
    )
    num_requests = sum(group.request_num for group in groups)
    if num_requests > MAX_REQUESTS:
        batch.inner("request_num").fail(f"makes {num_requests} requests; a batch has {MAX_REQUESTS} at most")
    return groups


def _read_group(place: Place, entry: object) -> RequestGroup:
    needed = ("sequence_len", "forwarding_token_num")
    table = place.table(entry, (*needed, "request_num"), needed)
    group = RequestGroup(
        sequence_len=place.integer(table, "sequence_len", 1, MAX_TOKENS, None),
        forwarding_token_num=place.integer(table, "forwarding_token_num", 1, MAX_TOKENS, None),
        request_num=place.integer(table, "request_num", 1, MAX_REQUESTS, 1),
    )
    if group.forwarding_token_num > group.sequence_len:
        place.inner("forwarding_token_num").fail(
            f"is {group.forwarding_token_num}, more than the sequence_len of {group.sequence_len}"
        )
    return group


# The older form: {"batch_0": {"dp_0": [...], "layer_forward_round": 1}, "batch_1": ...}. A
# layer_forward_round beside the batches is that of all which have none of their own.

_OLDER_KEY = re.compile(r"batch_([0-9]{1,9})", re.ASCII)
_DP_KEY = re.compile(r"dp_([0-9]{1,9})", re.ASCII)


def _is_older_key(key: str) -> bool:
    return _OLDER_KEY.fullmatch(key) is not None


def _read_older(file: Place, content: dict[str, Any]) -> list[Batch]:
    if len(content) > MAX_BATCHES:
        file.fail(f"must hold 1 to {MAX_BATCHES} batches, not {len(content)}")
    for_all = file.integer(content, "layer_forward_round", 1, MAX_LAYER_ROUNDS, 1)
    numbered = []
    for key, entry in content.items():
        if key == "layer_forward_round":
            continue
        match = _OLDER_KEY.fullmatch(key)
        if match is None:
            file.inner(shown(key)).fail("unknown key; known are batch_0, batch_1, ...")
        numbered.append((int(match[1]), key, entry))
    numbered.sort(key=lambda one: one[:2])
    return [_read_older_batch(file, key, entry, for_all) for _, key, entry in numbered]


def _read_older_batch(file: Place, name: str, entry: object, layer_forward_round: int) -> Batch:
    path = (f"batch {shown(name)}",)
    place = file.inner(*path)
    for key in entry if isinstance(entry, dict) else ():
        match = _DP_KEY.fullmatch(key)
        if match is not None and int(match[1]) > 0:
            place.inner(key).fail(
                "data parallelism is not built: there is one engine, whose requests are dp_0"
            )
    table = place.table(entry, ("dp_0", "layer_forward_round"), ("dp_0",))
    return Batch(
        name=name,
        place=path,
        groups=_read_groups(place, "dp_0", table["dp_0"]),
        layer_forward_round=place.integer(
            table, "layer_forward_round", 1, MAX_LAYER_ROUNDS, layer_forward_round
        ),
    )


def write_batches(file: Path, batches: list[Batch]) -> None:
    """The file that `read_batches` reads. Raises OSError."""
    content = {
        "batches": [
            {"name": batch.name, "requests": [msgspec.to_builtins(group) for group in batch.groups]}
            for batch in batches
        ]
    }
    write_atomically(file, msgspec.json.format(msgspec.json.encode(content), indent=1))
