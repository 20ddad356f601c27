"""Which changes of a model's bytes its fingerprints see."""

from __future__ import annotations

from pathlib import Path

import pytest

from ksana.models.checkpoint import open_checkpoint
from ksana.models.fingerprint import END_BYTES, fingerprint, full_fingerprint
from tests.models_for_tests import tiny_llama_dir, tiny_llama_gguf


def change_byte(path: Path, in_tensor: float, *, end: bool = False) -> None:
    """Flip the lowest bit of one byte of the largest tensor, the share `in_tensor` into it."""
    tensors = open_checkpoint(path).stored_tensors()
    raw = max((raw for _, raw in tensors), key=len)
    assert len(raw) > 4 * END_BYTES
    file = path if path.is_file() else next(path.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    offset = bytes(content).index(raw.tobytes()) + (len(raw) - 1 if end else int(len(raw) * in_tensor))
    del raw, tensors
    content[offset] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("kind", ["directory", "gguf"])
def test_one_element_in_the_middle_changes_the_full_fingerprint(tmp_path: Path, kind: str) -> None:
    path = tiny_llama_dir(tmp_path / "a") if kind == "directory" else tiny_llama_gguf(tmp_path)
    prints = {full_fingerprint(path)}
    assert prints == {full_fingerprint(path)}
    for share in (0.5, 0.503, 0.71):
        change_byte(path, share)
        prints.add(full_fingerprint(path))
    assert len(prints) == 4


def test_where_a_model_lies_changes_no_full_fingerprint(tmp_path: Path) -> None:
    paths = [tiny_llama_dir(tmp_path / "a"), tiny_llama_dir(tmp_path / "b")]
    assert len({full_fingerprint(path) for path in paths}) == 1
    assert not {full_fingerprint(path) for path in paths} & {fingerprint(path) for path in paths}


def test_the_sample_has_both_ends(tmp_path: Path) -> None:
    path = tiny_llama_dir(tmp_path / "a")
    prints = {fingerprint(path)}
    raw_bytes = max(len(raw) for _, raw in open_checkpoint(path).stored_tensors())
    change_byte(path, (END_BYTES - 1) / raw_bytes)
    prints.add(fingerprint(path))
    change_byte(path, 1 - (END_BYTES - 2) / raw_bytes)
    prints.add(fingerprint(path))
    change_byte(path, 0, end=True)
    prints.add(fingerprint(path))
    assert len(prints) == 4
