"""What travels on the socket between an executor's process backend and its worker.

executor -> worker   Header (settings: WorkerSettings), then orders: StepPlan, CopyFromStaging, CopyToStaging
worker -> executor   Header, LoadProgress ..., WorkerInfo or WorkerFailed, then one StepDone or StagingCopied
                     for each order

Staging memory is no part of it: the worker inherits its file descriptor, whose number is in the settings.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ksana.devices.backend import Answer, Order, WorkerInfo, WorkerSettings
from ksana.runtime.frames import Header, encode_frame

FORMAT = "ksana.worker"


class LoadProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Tensors loaded so far, and in all."""

    done: int
    total: int


class WorkerFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker could not start; it exits after this. `model`: as it is, this model can never load."""

    kind: Literal["model", "other"]
    message: str


FromWorker = LoadProgress | WorkerInfo | WorkerFailed | Answer

_encoder = msgspec.msgpack.Encoder()
header_decoder = msgspec.msgpack.Decoder(Header)
order_decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
from_worker_decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def encode(message: Header | Order | FromWorker) -> bytes:
    """One frame. Raises FrameError when it would be too long."""
    return encode_frame(_encoder.encode(message))


def settings_header(settings: WorkerSettings, model_fingerprint: str = "") -> Header:
    """The first frame to a worker."""
    return Header(format=FORMAT, model_fingerprint=model_fingerprint, settings=msgspec.to_builtins(settings))


def settings_of(header: Header) -> WorkerSettings:
    """The worker's settings out of its first frame. Raises FrameError or msgspec.ValidationError."""
    header.check(FORMAT)
    return msgspec.convert(header.settings, WorkerSettings)
