"""A redacted journal: nothing of the prompts is in it, and what decides still replays."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from ksana.cache.cache_config import CacheConfig
from ksana.cache.chain_keys import chain_keys, root_key
from ksana.errors import ConfigError
from ksana.journal.chain_names import MAX_NAMES, ChainNames
from ksana.journal.reading import list_segments
from ksana.journal.redaction import Redaction, Unredactable
from ksana.journal.redaction_key import permutation, read_or_make_key
from ksana.journal.replay import replay
from ksana.journal.schema import message_types
from ksana.journal.without_content import WITHOUT_CONTENT
from ksana.messages.outputs import Failed, PromptAccepted, RequestEnded, StepOutputs, Usage
from ksana.messages.remote import LoadPrefix
from ksana.messages.steps import RowResult, StepDone, StepTimes, WorkerLost
from tests.journal.recording import ACTORS, Run, record

KEY = bytes(range(32))
RUN = 4
"""Ids in a row that nothing has by chance."""


def contents(directory: Path) -> bytes:
    return b"".join(segment.path.read_bytes() for segment in list_segments(directory))


def traces_of(token_ids: Sequence[int]) -> list[bytes]:
    """How a run of these ids looks in messages and in the state of the allocator."""
    packed = msgspec.msgpack.encode(token_ids)
    return [packed[1:], array("i", token_ids).tobytes()]


def num_found(run: Run, data: bytes) -> int:
    """Runs of prompts and outputs that are in there, and what is secret besides."""
    sequences = [*run.prompts, *run.outputs.values()]
    windows = [tuple(ids[at : at + RUN]) for ids in sequences for at in range(0, len(ids) - RUN, 16)]
    # Of msgpack every 6th window, else this takes minutes.
    found = sum(any(trace in data for trace in traces_of(window)) for window in windows[::6])
    keys = [
        key
        for prompt in run.prompts[:20]
        for salt in ("", "secret tenant")
        for key in chain_keys(root_key(b"simulated", salt), prompt, 8)
    ]
    return found + sum(key in data for key in keys) + data.count(b"secret")


def test_it_replays_and_holds_no_prompt(tmp_path: Path) -> None:
    plain = record(tmp_path / "plain", seed=3, num_requests=100)
    redacted = record(tmp_path / "redacted", seed=3, num_requests=100, redaction_key=KEY)
    assert plain.outputs == redacted.outputs, "recording changes nothing"
    assert plain.status.counters.num_preemptions > 0
    assert plain.status.load_outcomes["loaded"] > 0
    assert num_found(plain, contents(tmp_path / "plain")) > 100, "the search finds what is there"
    assert num_found(redacted, contents(tmp_path / "redacted")) == 0
    assert b"planned crash" in contents(tmp_path / "plain"), "a worker's last words"
    assert b"planned crash" not in contents(tmp_path / "redacted")

    segments = list_segments(tmp_path / "redacted")
    assert all(segment.header.redacted for segment in segments)
    report = replay(segments, ACTORS)
    assert report.difference is None
    assert report.by_actor.keys() == set(ACTORS)
    alone = [replay([segment], ACTORS).difference for segment in segments]
    assert alone == [None] * len(segments)


def test_every_message_is_redacted_or_holds_nothing_or_is_never_written() -> None:
    never = {"Generate", "PromptAccepted", "TextDelta", "Ended", "EncodePrompt", "PromptEncoded"}
    by_hand = set(Redaction._REDACT)
    for kind in message_types():
        of_text_or_perf = kind.__name__ in never or kind.__module__ == "ksana.messages.perf"
        places = [kind in WITHOUT_CONTENT, kind in by_hand, of_text_or_perf]
        assert places.count(True) == 1, kind


def test_what_it_does_not_know_is_refused() -> None:
    redaction = Redaction(KEY, CacheConfig(block_size=4, num_fa_blocks=1), 100)
    with pytest.raises(Unredactable, match="PromptAccepted"):
        redaction.message(PromptAccepted(request_id=1, prompt_token_ids=(1,), max_tokens=1))
    for wrong in (100, -1):
        done = StepDone(
            pool_epoch=1,
            step_id=1,
            results=(RowResult(request_id=1, token_ids=(wrong,)),),
            times=StepTimes(prepare_ns=0, forward_ns=0, sample_ns=0),
        )
        with pytest.raises(IndexError):
            redaction.message(done)


def test_words_of_a_worker_are_left_out_wherever_the_scheduler_repeats_them() -> None:
    redaction = Redaction(KEY, CacheConfig(block_size=4, num_fa_blocks=1), 100)
    words = "IndexError: token 4711: out of range"
    failed = Failed(status=500, message=f"Computing token 9 failed: {words}")
    usage = Usage(num_prompt_tokens=1, num_output_tokens=0)
    outputs = StepOutputs(step_id=1, ended=(RequestEnded(request_id=1, outcome=failed, usage=usage),))
    assert redaction.message(outputs) == outputs, "nobody said that"
    done = StepDone(
        pool_epoch=1,
        step_id=1,
        results=(RowResult(request_id=1, error=words),),
        times=StepTimes(prepare_ns=0, forward_ns=0, sample_ns=0),
    )
    assert "4711" not in str(redaction.message(done))
    redacted = redaction.message(outputs)
    assert "4711" not in str(redacted)
    assert "Computing token 9 failed: left out" in str(redacted)
    lost = WorkerLost(pool_epoch=1, reason="it last said: a prompt", restarting=False)
    assert "prompt" not in str(redaction.message(lost))


def test_the_permutation_is_one_and_depends_on_the_key() -> None:
    one, two = permutation(KEY, 1000), permutation(bytes(32), 1000)
    assert sorted(one) == list(range(1000))
    assert one == permutation(KEY, 1000)
    assert sum(a == b for a, b in zip(one, two, strict=True)) < 20


def test_chain_keys_are_those_of_the_renamed_tokens() -> None:
    """However the tokens become known: bit by bit, in a load, or again after the request came back."""
    config = CacheConfig(block_size=4, num_fa_blocks=1, write_back=True, chain_identity=b"i")
    names = permutation(KEY, 100)
    chains = ChainNames(config, lambda ids: [names[i] for i in ids], lambda salt: f"{salt}!")
    tokens = tuple(range(50, 61))
    load = LoadPrefix(
        pool_epoch=1,
        request_id=7,
        token_ids=tokens[:6],
        cache_salt="s",
        num_reserved_tokens=1,
        give_up_at_s=1,
        prefill_tokens_per_s=1,
    )
    chains.see(load)
    chains.see(msgspec.structs.replace(load, token_ids=tokens))
    original = chain_keys(root_key(b"i", "s"), tokens, 4)
    renamed = chain_keys(root_key(b"i", "s!"), [names[i] for i in tokens], 4)
    assert [chains.name(key) for key in original] == renamed
    assert chains.name(hashlib.sha256().digest()) is None
    assert MAX_NAMES > 1 << 17
    chains.see(StepOutputs(step_id=1))


def test_the_key_is_made_kept_private_and_read_again(tmp_path: Path) -> None:
    file = tmp_path / "key"
    key = read_or_make_key(str(file))
    assert len(key) == 32
    assert read_or_make_key(str(file)) == key
    assert file.stat().st_mode & 0o077 == 0
    assert read_or_make_key(None) != read_or_make_key(None)
    file.write_text("not hexadecimal")
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        read_or_make_key(str(file))
    with pytest.raises(ConfigError, match="cannot be used"):
        read_or_make_key(str(tmp_path / "nowhere" / "key"))
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(ConfigError, match=r"no regular file|cannot be used"):
            read_or_make_key(str(tmp_path / name))


def test_a_key_is_for_its_owner_alone_and_one_that_is_not_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "key"
    before = os.umask(0)
    try:
        key = read_or_make_key(str(file))
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o7777 == 0o600
    assert read_or_make_key(str(file)) == key
    assert caplog.messages == []
    file.chmod(0o640)
    assert read_or_make_key(str(file)) == key
    (line,) = caplog.messages
    assert "can be read by others on this machine (mode 0640): `chmod 600` it" in line
