"""Which model this is, so that caches and journals of one are never taken for another's. No torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from ksana.models.checkpoint import open_checkpoint

SAMPLE_BYTES = 256
NUM_SAMPLES = 16


def fingerprint(path: Path) -> str:
    """SHA-256 (hex) over the spec and, of every stored tensor, name, shape, type and a sample of its bytes.

    The sample is up to 16 pieces of 256 bytes, evenly spread and including the end, so a fine-tune, which
    moves weights everywhere, differs. Renaming the model or moving the file changes nothing.
    """
    checkpoint = open_checkpoint(path)
    digest = hashlib.sha256(b"ksana model fingerprint 1\n")
    digest.update(msgspec.json.encode(msgspec.structs.replace(checkpoint.spec, name="")))
    for tensor, raw in checkpoint.stored_tensors():
        digest.update(f"\n{tensor.name}\n{list(tensor.shape)}\n{tensor.type_name}\n".encode())
        last = max(0, len(raw) - SAMPLE_BYTES)
        starts = {last * piece // (NUM_SAMPLES - 1) for piece in range(NUM_SAMPLES)}
        for start in sorted(starts):
            digest.update(raw[start : start + SAMPLE_BYTES].tobytes())
    return digest.hexdigest()
