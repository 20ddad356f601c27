"""Which model this is, so that caches and journals of one are never taken for another's. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from ksana.models.checkpoint import open_checkpoint

Raw: TypeAlias = npt.NDArray[np.uint8]

END_BYTES = 4096
PIECE_BYTES = 64
NUM_PIECES = 64


def fingerprint(path: Path) -> str:
    """SHA-256 (hex) over the spec and, of every stored tensor, name, shape, type and a sample of its bytes.

    The sample is the first and last 4 KiB and 64 pieces of 64 bytes, evenly spread, so a fine-tune, which
    moves weights everywhere, differs. Renaming the model or moving the file changes nothing. Models that
    differ in a few values may look the same: where that matters take `full_fingerprint`.
    """
    return _fingerprint(path, b"ksana model fingerprint 2\n", _sample)


def full_fingerprint(path: Path) -> str:
    """As `fingerprint`, but over every byte of every stored tensor: what caches are shared by.

    Reads the whole model, at about 1 to 2 GB/s when it is in memory. Never equal to a `fingerprint`.
    """
    return _fingerprint(path, b"ksana full model fingerprint 1\n", lambda raw: [raw])


def _fingerprint(path: Path, kind: bytes, select: Callable[[Raw], Iterable[Raw]]) -> str:
    checkpoint = open_checkpoint(path)
    digest = hashlib.sha256(kind)
    digest.update(msgspec.json.encode(msgspec.structs.replace(checkpoint.spec, name="")))
    for tensor, raw in checkpoint.stored_tensors():
        digest.update(f"\n{tensor.name}\n{list(tensor.shape)}\n{tensor.type_name}\n".encode())
        for piece in select(raw):
            digest.update(piece.data)
    return digest.hexdigest()


def _sample(raw: Raw) -> Iterator[Raw]:
    yield raw[:END_BYTES]
    last = max(0, len(raw) - PIECE_BYTES)
    for piece in range(NUM_PIECES):
        start = last * piece // (NUM_PIECES - 1)
        yield raw[start : start + PIECE_BYTES]
    yield raw[-END_BYTES:]
