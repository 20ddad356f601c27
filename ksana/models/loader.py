"""From files to a model that computes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from ksana.models.checkpoint import open_checkpoint
from ksana.models.decoder import Model
from ksana.models.registry import FAMILIES
from ksana.models.tensors import decoder_tensors

Progress = Callable[[int, int], None]


def load_model(path: Path, progress: Progress | None = None, max_positions: int | None = None) -> Model:
    """Load a Hugging Face directory or a GGUF file into memory, as float32.

    `progress(done, total)` is called after each tensor. `max_positions` bounds the rotary tables (default:
    all the model allows). Raises ModelLoadError, naming file and tensor, before anything large is allocated
    if the files are incomplete, and on the way if values are not finite.
    """
    checkpoint = open_checkpoint(path)
    spec = checkpoint.spec
    total = sum(1 for _ in decoder_tensors(spec)) + checkpoint.has_head
    done = 0

    def on_read() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    positions = min(max_positions or spec.max_position, spec.max_position)
    build = importlib.import_module(FAMILIES[spec.family].decoder).build
    model: Model = build(checkpoint, positions, on_read)
    return model
