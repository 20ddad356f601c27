"""Journals that are cut off, damaged or made to do harm: told as such, and never taken for whole."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana.errors import KsanaError
from ksana.journal.format import (
    Activation,
    CoreState,
    Frame,
    SegmentEnd,
    SegmentHeader,
    segment_name,
)
from ksana.journal.reading import JournalError, Tail, list_segments, read_frames
from ksana.journal.replay import ReplayReport, replay
from ksana.journal.requests import recorded_requests
from ksana.runtime.frames import LENGTH_AND_CRC, FrameDecoder, Header, encode_frame
from tests.journal.recording import ACTORS, record


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal of one segment."""
    directory = tmp_path_factory.mktemp("whole")
    record(directory, num_requests=12, segment_bytes=1 << 30)
    assert len(list_segments(directory)) == 1
    return directory


def replayed(directory: Path) -> ReplayReport:
    return replay(list_segments(directory), ACTORS)


def with_bytes(tmp_path: Path, data: bytes, number: int = 1) -> Path:
    (tmp_path / segment_name(number)).write_bytes(data)
    return tmp_path


def frames_of(directory: Path) -> list[bytes]:
    data = list_segments(directory)[0].path.read_bytes()
    return list(FrameDecoder(with_crc=True).feed(data))


def written(frames: list[Any]) -> bytes:
    """Frames with checksums that fit, whatever is in them."""
    payloads = [f if isinstance(f, bytes) else msgspec.msgpack.encode(f) for f in frames]
    return b"".join(encode_frame(payload, with_crc=True) for payload in payloads)


def test_a_flipped_byte_anywhere_is_told(whole: Path, tmp_path: Path) -> None:
    data = list_segments(whole)[0].path.read_bytes()
    rng = random.Random(1)
    starts, offset = [], 0
    for payload in frames_of(whole):
        starts.append(offset)
        offset += 8 + len(payload)
    # Lengths, checksums and first bytes of some frames, of the last three, and bytes anywhere.
    places = [start + at for start in (*starts[:6], *starts[-3:]) for at in range(9)]
    places += [rng.randrange(len(data)) for _ in range(60)] + [len(data) - 1]
    for place in places:
        flipped = bytearray(data)
        flipped[place] ^= 1 << rng.randrange(8)
        with pytest.raises(JournalError) as raised:
            replayed(with_bytes(tmp_path, bytes(flipped)))
        assert segment_name(1) in str(raised.value), place


def test_the_flipped_length_of_a_frame_too_long_to_look_behind_it_is_told(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States may have more bytes than are looked through for the next frame."""
    monkeypatch.setattr("ksana.journal.cut_off._SEARCH_BYTES", 100)
    data = bytearray(list_segments(whole)[0].path.read_bytes())
    state_at = 8 + len(frames_of(whole)[0])
    data[state_at + 3] ^= 0x40
    with pytest.raises(JournalError, match=f"damaged at byte {state_at}: the length of a frame is wrong"):
        replayed(with_bytes(tmp_path, bytes(data)))


def test_a_tail_that_was_cut_off_is_told_and_the_rest_replays(whole: Path, tmp_path: Path) -> None:
    data = list_segments(whole)[0].path.read_bytes()
    full = replayed(whole)
    header_end = 8 + len(frames_of(whole)[0])
    rng = random.Random(2)
    for cut in (header_end, len(data) - 1, *(rng.randrange(header_end, len(data)) for _ in range(25))):
        report = replayed(with_bytes(tmp_path, data[:cut]))
        assert report.difference is None
        assert report.num_activations <= full.num_activations
        [note] = report.notes
        assert "ends without an end" in note
    with pytest.raises(JournalError, match="no whole segment"):
        replayed(with_bytes(tmp_path, data[:100]))


def test_what_is_written_while_it_is_read_makes_a_cut_no_damage(whole: Path, tmp_path: Path) -> None:
    """A server may go on writing: the half of a frame that was there at first is whole by then."""
    data = list_segments(whole)[0].path.read_bytes()
    cut = len(data) - len(frames_of(whole)[-1]) - 8 - 3  # in the last activation
    [segment] = list_segments(with_bytes(tmp_path, data[:cut]))
    tail = Tail()
    frames = read_frames(segment, tail)
    next(frames)
    with segment.path.open("ab") as file:
        file.write(data[cut:])
    assert len(list(frames)) > 10
    assert tail.num_cut_bytes > 0
    assert "still writes" in str(tail.in_words())


def test_a_segment_that_was_being_begun_is_passed_over(whole: Path, tmp_path: Path) -> None:
    data = list_segments(whole)[0].path.read_bytes()
    with_bytes(tmp_path, data)
    assert replayed(with_bytes(tmp_path, data[:20], 2)).num_segments == 1


def test_a_process_killed_while_it_began_a_segment_spoils_nothing_of_the_next(
    tmp_path: Path,
) -> None:
    record(tmp_path, seed=1, num_requests=12)
    last = list_segments(tmp_path)[-1].number
    (tmp_path / segment_name(last + 1)).write_bytes(b"")
    record(tmp_path, seed=2, num_requests=12)
    report = replayed(tmp_path)
    assert report.difference is None
    assert report.by_actor["scheduler"] > 0
    assert report.notes == [f"segment {last + 1} is not there, or without a whole header"]


def test_segments_that_are_not_what_their_names_say(tmp_path: Path) -> None:
    record(tmp_path, num_requests=30, segment_bytes=64 << 10)
    segments = list_segments(tmp_path)
    assert len(segments) > 3
    first, second, third = (segment.path for segment in segments[:3])
    whole, data = replayed(tmp_path), second.read_bytes()

    second.write_bytes(third.read_bytes())
    with pytest.raises(JournalError, match="is segment 3 under another name"):
        replayed(tmp_path)
    second.write_bytes(b"")
    with pytest.raises(JournalError, match="no whole header, but the process went on"):
        replayed(tmp_path)
    second.unlink()
    report = replayed(tmp_path)
    assert report.difference is None
    assert report.notes == ["segment 2 is not there, or without a whole header"]
    with pytest.raises(JournalError, match="segment 2 is not there"):
        recorded_requests(tmp_path)

    second.write_bytes(data)
    first.unlink()
    report = replayed(tmp_path)
    assert report.notes == [], "the oldest ones go"
    assert report.num_activations < whole.num_activations


def test_a_cut_in_the_middle_of_a_run_is_damage(tmp_path: Path) -> None:
    record(tmp_path, num_requests=30, segment_bytes=64 << 10)
    segments = list_segments(tmp_path)
    assert len(segments) > 2
    with segments[0].path.open("r+b") as file:
        file.truncate(segments[0].path.stat().st_size - 5)
    with pytest.raises(JournalError, match="but the process went on"):
        replayed(tmp_path)


def edited(whole: Path, tmp_path: Path, edit: Callable[[list[Any]], None]) -> Path:
    """The journal with its frames as `edit` leaves them, and checksums that fit."""
    header, *rest = frames_of(whole)
    decoded: list[Any] = [msgspec.msgpack.decode(header, type=SegmentHeader)]
    decoded += [msgspec.msgpack.decode(frame, type=Frame) for frame in rest]
    edit(decoded)
    return with_bytes(tmp_path, written(decoded))


def first_activation(frames: list[Any]) -> int:
    return next(at for at, frame in enumerate(frames) if isinstance(frame, Activation) and frame.messages)


def huge_pool(frames: list[Any]) -> None:
    cache = msgspec.structs.replace(frames[0].settings.cache, num_fa_blocks=10**12)
    frames[0] = msgspec.structs.replace(
        frames[0], settings=msgspec.structs.replace(frames[0].settings, cache=cache)
    )


def huge_staging(frames: list[Any]) -> None:
    loader = msgspec.structs.replace(frames[0].settings.loader, num_slots=10**12)
    frames[0] = msgspec.structs.replace(
        frames[0], settings=msgspec.structs.replace(frames[0].settings, loader=loader)
    )


def no_actor(frames: list[Any]) -> None:
    at = first_activation(frames)
    frames[at] = msgspec.structs.replace(frames[at], actor=77)


def no_state(frames: list[Any]) -> None:
    del frames[1:5]


def empty_states(frames: list[Any]) -> None:
    frames[1] = CoreState(0, b"")


def foreign_state(frames: list[Any]) -> None:
    frames[1], frames[2] = CoreState(0, frames[2].state), CoreState(1, frames[1].state)


def smaller_pool(frames: list[Any]) -> None:
    state = msgspec.msgpack.decode(frames[2].state)
    state["fa"]["pool"]["free"].append(10**6)
    frames[2] = CoreState(1, msgspec.msgpack.encode(state))


def unsaid(frames: list[Any]) -> None:
    at = first_activation(frames)
    frames[at] = msgspec.structs.replace(frames[at], numbers=[123456])


def no_message(frames: list[Any]) -> None:
    at = first_activation(frames)
    frames[at] = msgspec.structs.replace(frames[at], messages=[msgspec.Raw(b"\xc0")])


def told_to_nobody(frames: list[Any]) -> None:
    at = first_activation(frames)
    frames[at] = msgspec.structs.replace(frames[at], messages=[*frames[at].messages, frames[at].messages[0]])


def state_twice(frames: list[Any]) -> None:
    frames.insert(2, frames[1])


def late_state(frames: list[Any]) -> None:
    frames.insert(first_activation(frames) + 1, frames[1])


def renumbered(frames: list[Any]) -> None:
    frames[0] = msgspec.structs.replace(frames[0], segment=2)


def strange_actor(frames: list[Any]) -> None:
    frames[0] = msgspec.structs.replace(frames[0], actors=(*frames[0].actors, "producer"))


def actor_twice(frames: list[Any]) -> None:
    frames[0] = msgspec.structs.replace(frames[0], actors=(*frames[0].actors, "scheduler"))


def nameless_run(frames: list[Any]) -> None:
    frames[0] = msgspec.structs.replace(frames[0], run="\x1b[2J")


DEEP = b"\x91" * 1_000_000 + b"\xc0"


def deep_frame(frames: list[Any]) -> None:
    frames[first_activation(frames)] = DEEP


def deep_header(frames: list[Any]) -> None:
    frames[0] = b"\x82\xa6format\xadksana.journal\xa8settings\x81\xa1a" + DEEP


def deep_message(frames: list[Any]) -> None:
    at = first_activation(frames)
    frames[at] = msgspec.structs.replace(frames[at], numbers=[0], messages=[msgspec.Raw(DEEP)])


def deep_state(frames: list[Any]) -> None:
    frames[1] = CoreState(0, DEEP)


def after_the_end(frames: list[Any]) -> None:
    frames.append(frames[first_activation(frames)])


def missing_frame(frames: list[Any]) -> None:
    del frames[-2]


def other_messages(frames: list[Any]) -> None:
    frames[0] = msgspec.structs.replace(frames[0], schema_hash="0" * 64)


def other_format(frames: list[Any]) -> None:
    frames[0] = Header(format="ksana.worker")


def later_version(frames: list[Any]) -> None:
    frames[0] = msgspec.structs.replace(frames[0], journal_version=2)


def no_frame(frames: list[Any]) -> None:
    frames[-2] = b"\x93\x09\x01\x02"


def wrong_end(frames: list[Any]) -> None:
    frames[-1] = SegmentEnd(3)


@pytest.mark.parametrize(
    "edit",
    [
        huge_pool,
        huge_staging,
        no_actor,
        no_state,
        empty_states,
        foreign_state,
        smaller_pool,
        unsaid,
        no_message,
        after_the_end,
        missing_frame,
        other_messages,
        other_format,
        later_version,
        no_frame,
        wrong_end,
        told_to_nobody,
        state_twice,
        late_state,
        renumbered,
        strange_actor,
        actor_twice,
        nameless_run,
        deep_frame,
        deep_header,
        deep_message,
        deep_state,
    ],
    ids=lambda edit: edit.__name__,
)
def test_what_the_checksums_fit_but_is_no_journal(
    whole: Path, tmp_path: Path, edit: Callable[[list[Any]], None]
) -> None:
    with pytest.raises(JournalError) as raised:
        replayed(edited(whole, tmp_path, edit))
    assert raised.value.exit_code == 2
    assert len(str(raised.value)) < 2000


def test_an_edited_message_is_a_difference(whole: Path, tmp_path: Path) -> None:
    def edit(frames: list[Any]) -> None:
        at = next(
            at
            for at, frame in enumerate(frames)
            if isinstance(frame, Activation) and any(b"BlocksPlanned" in bytes(raw) for _, raw in frame.said)
        )
        said = [
            (address, msgspec.Raw(bytes(raw).replace(b"\xa7step_id\x01", b"\xa7step_id\x02")))
            for address, raw in frames[at].said
        ]
        assert said != frames[at].said
        frames[at] = msgspec.structs.replace(frames[at], said=said)

    difference = replayed(edited(whole, tmp_path, edit)).difference
    assert difference is not None
    assert difference.actor == "block_allocator"
    assert "step_id=2" in difference.recorded
    assert "step_id=1" in difference.replayed


def test_garbage_with_fitting_checksums_never_does_more_than_fail(whole: Path, tmp_path: Path) -> None:
    rng = random.Random(5)
    frames = frames_of(whole)
    outcomes = set()
    for _ in range(150):
        at = rng.randrange(len(frames) - 1)
        garbled = bytearray(frames[at])
        for _ in range(rng.randrange(1, 4)):
            garbled[rng.randrange(len(garbled))] = rng.randrange(256)
        data = written([*frames[:at], bytes(garbled), *frames[at + 1 :]])
        try:
            report = replayed(with_bytes(tmp_path, data))
            outcomes.add("same" if report.difference is None else "different")
        except KsanaError:
            outcomes.add("refused")
    assert {"different", "refused"} <= outcomes


def test_only_regular_files_with_the_right_names_are_segments(whole: Path, tmp_path: Path) -> None:
    source = list_segments(whole)[0].path
    for name in ("segment-1.ksj", "segment-00000002.ksj.tmp", "../escape", "segment-0000000a.ksj", "x\ny"):
        if "/" not in name:
            shutil.copy(source, tmp_path / name)
    os.symlink(source, tmp_path / segment_name(3))
    os.mkfifo(tmp_path / segment_name(4))
    (tmp_path / segment_name(5)).mkdir()
    with pytest.raises(JournalError, match=r"segment-00000003\.ksj is no regular file"):
        list_segments(tmp_path)
    with pytest.raises(JournalError, match="cannot be read"):
        list_segments(tmp_path / "nowhere")


def test_a_length_that_would_fill_the_memory_is_damage(whole: Path, tmp_path: Path) -> None:
    frames = frames_of(whole)
    data = written(frames[:3]) + b"\xff\xff\xff\xff" + b"\x00\x00\x00\x00" + written(frames[3:])
    with pytest.raises(JournalError, match="the length of a frame is wrong"):
        replayed(with_bytes(tmp_path, data))


@given(st.binary(max_size=300))
def test_any_bytes_are_no_journal(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.raises(JournalError):
        replayed(with_bytes(Path(directory), data))


def test_a_last_segment_cut_anywhere_is_told(whole: Path, tmp_path: Path) -> None:
    """In its header, in a state, in an activation, and without a byte: never passed over without a word."""
    data = list_segments(whole)[0].path.read_bytes()
    header_end = 8 + len(frames_of(whole)[0])
    with_bytes(tmp_path, data)
    full = replayed(tmp_path).num_activations
    for cut in range(header_end):
        told: list[str] = []
        segments = list_segments(with_bytes(tmp_path, data[:cut], 2), told.append)
        assert [segment.number for segment in segments] == [1]
        [note] = told
        assert note.startswith(f"{segment_name(2)} is left out: its {cut} bytes are no whole header")
    assert replay(segments, ACTORS).num_activations == full


@pytest.mark.parametrize("kind", ["pipe", "directory", "link"])
def test_what_is_no_file_in_the_place_of_a_segment_is_refused(whole: Path, tmp_path: Path, kind: str) -> None:
    path = with_bytes(tmp_path, list_segments(whole)[0].path.read_bytes()) / segment_name(2)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / segment_name(1))
    with pytest.raises(JournalError, match=f"{segment_name(2)} is no regular file"):
        list_segments(tmp_path)


def test_missing_first_segments_and_other_files_are_told(tmp_path: Path) -> None:
    record(tmp_path, num_requests=30, segment_bytes=64 << 10)
    (tmp_path / segment_name(1)).unlink()
    (tmp_path / "segment-3.ksj").write_bytes(b"x")
    (tmp_path / "notes.txt").write_bytes(b"x")
    told: list[str] = []
    list_segments(tmp_path, told.append)
    assert told == [
        "'segment-3.ksj' is left out: its name is not segment-NNNNNNNN.ksj",
        "segment 1 is not there: the journal begins with segment 2",
    ]


@pytest.mark.parametrize("length", [0xFFFFFFFF, (256 << 20) + 1])
def test_a_length_that_no_frame_has_is_damage_also_at_the_end(
    whole: Path, tmp_path: Path, length: int
) -> None:
    data = list_segments(whole)[0].path.read_bytes()
    frames = frames_of(whole)
    end_at = len(data) - 8 - len(frames[-1])
    for start in (0, end_at):
        broken = data[:start] + LENGTH_AND_CRC.pack(length, 1) + data[start + 8 :][:6]
        with pytest.raises(JournalError, match=f"damaged at byte {start}"):
            replayed(with_bytes(tmp_path, broken))


def test_damage_says_how_much_was_replayed_before_it(whole: Path, tmp_path: Path) -> None:
    data = bytearray(list_segments(whole)[0].path.read_bytes())
    data[-1] ^= 1
    num = replayed(whole).num_activations
    with pytest.raises(JournalError, match=f"before that, {num} activations replayed"):
        replayed(with_bytes(tmp_path, bytes(data)))
