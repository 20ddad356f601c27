"""The two kinds of struct that messages are made of."""

from __future__ import annotations

from typing import dataclass_transform

import msgspec

RequestId = int
"""Unique within one engine's lifetime and increasing in the order of arrival."""

StepId = int
"""Steps are numbered from 1 within one engine's lifetime; a worker restart does not reset them."""

PoolEpoch = int
"""Counts worker starts. KV written in one epoch means nothing in another."""

SCHEMA_VERSION = 1
"""Version of everything in `ksana.messages`; a header frame carries it."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Value(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A part of a message: ids, numbers, text and tuples of them; never a live object."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """What one actor says to another. The class name is the tag on the wire."""
