"""What lies in a journal's directory: segments, each a file that can be read without the others.

    segment   header, one CoreState for each recorded actor, Activations in the order in which they happened,
              SegmentEnd (missing if the process was killed, or is still writing)

Each of these is a frame with a checksum (`ksana.runtime.frames`). What is said from one recorded actor to
another is written once: where it is said. Messages said are numbered through the segment, from 1; the
activation of the receiver names the number.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from ksana.cache.cache_config import CacheConfig
from ksana.loading.settings import LoaderSettings
from ksana.messages.base import SCHEMA_VERSION
from ksana.runtime.actor import Address
from ksana.scheduling.settings import SchedulerSettings

FORMAT = "ksana.journal"
VERSION = 1
"""Of this layout; what messages and states look like is in the schema hash."""

SEGMENT_NAME = re.compile(r"segment-([0-9]{8})\.ksj", re.ASCII)
MAX_SEGMENTS = 10**8
RUN_NAME = re.compile(r"[0-9A-Za-z_-]{1,64}", re.ASCII)
UNREADABLE = (ValueError, RecursionError)
"""What msgspec raises for bytes that are not of the type asked for: its own errors are ValueErrors, but what
is nested too deeply is a RecursionError."""


def segment_name(number: int) -> str:
    return f"segment-{number:08d}.ksj"


class RecordedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the recorded cores were started with."""

    scheduler: SchedulerSettings
    cache: CacheConfig
    loader: LoaderSettings | None = None
    max_model_len: int
    vocab_size: int
    model: str = ""
    """What it was called, to be shown. Never opened: a journal may come from anywhere."""


class SegmentHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Begins as every header of Ksana's frames (`ksana.runtime.frames.Header`)."""

    format: str = FORMAT
    version: int = SCHEMA_VERSION
    model_fingerprint: str = ""
    settings: RecordedSettings
    journal_version: int = VERSION
    schema_hash: str
    run: str
    """Names the process that wrote it, as `RUN_NAME`."""
    segment: int
    generation: int
    """Counts fresh cores within the run: a state goes on from one segment to the next of a generation."""
    actors: tuple[Address, ...]
    """Those that are recorded. Frames name an actor by its place here."""
    redacted: bool = False
    now_s: float
    """Clock time at which the states were taken."""
    wall_time_s: float = 0.0
    """The same, in seconds since 1970; for people only."""


class CoreState(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The snapshot of one actor's core: msgpack of its type in `ksana.journal.schema.STATE_TYPES`."""

    actor: int
    state: bytes


class Activation(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """One activation. Without messages and with `error` empty it is a timer's."""

    actor: int
    now_s: float
    numbers: list[int]
    """For each message in: the number under which it was said, or 0: the next of `messages`."""
    messages: list[msgspec.Raw]
    said: list[tuple[Address, msgspec.Raw]]
    error: str = ""
    """What the core raised; then nothing was said."""


class SegmentEnd(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Nothing is missing. `num_frames` are before this one."""

    num_frames: int


Frame = CoreState | Activation | SegmentEnd


class WrittenActivation(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """An Activation on its way to the file: the messages themselves instead of their bytes."""

    actor: int
    now_s: float
    numbers: list[int]
    messages: list[Any]
    said: list[Any]
    error: str = ""
