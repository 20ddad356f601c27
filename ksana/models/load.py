"""What engine and worker ask about a model's files without torch."""

from __future__ import annotations

from ksana.models.checkpoint import Checkpoint, open_checkpoint, read_spec
from ksana.models.fingerprint import fingerprint, full_fingerprint

__all__ = ["Checkpoint", "fingerprint", "full_fingerprint", "open_checkpoint", "read_spec"]
