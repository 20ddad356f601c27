"""Checkpoints are complete, rightly shaped and finite, or they are refused with the file and the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from ksana.errors import ModelLoadError
from ksana.models.load import fingerprint, open_checkpoint, read_spec
from ksana.models.tensors import decoder_tensors
from tests.models_for_tests import (
    tiny_gemma3_dir,
    tiny_gemma3_gguf,
    tiny_llama_dir,
    tiny_llama_gguf,
)
from tests.tiny_models import llama_config, random_weights, write_directory, write_gguf

Tensors = dict[str, np.ndarray]


def edit(directory: Path, change: Callable[[Tensors], Any]) -> Path:
    """Rewrite model.safetensors after `change` worked on its tensors."""
    path = directory / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    safetensors.numpy.save_file(tensors, path)
    return directory


def edit_config(directory: Path, **changes: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q), f"tensor '{Q}' is missing"),
        (lambda t: t.update({Q: t[Q].T[:, :-1].copy()}), rf"safetensors: tensor '{Q}' has shape \[64, 63\]"),
        (lambda t: t.update({Q: t[Q].astype(np.int8)}), f"safetensors: tensor '{Q}' has type I8"),
        (lambda t: t.update({Q: t[Q].astype(np.float64)}), f"safetensors: tensor '{Q}' has type F64"),
        (lambda t: t.update({Q + "_scale": np.ones(1, np.float32)}), f"tensor '{Q}_scale' is not part of"),
        (lambda t: t.update({Q[:-6] + "bias": np.ones(64, np.float32)}), r"q_proj\.bias' is not part of"),
    ],
)
def test_incomplete_or_wrong_tensors(tmp_path: Path, change: Callable[[Tensors], Any], message: str) -> None:
    directory = edit(tiny_llama_dir(tmp_path), change)
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(directory)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(tmp_path: Path, bad: float) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[Q][3, 5] = bad

    checkpoint = open_checkpoint(edit(tiny_llama_dir(tmp_path), spoil))
    with pytest.raises(ModelLoadError, match=f"tensor '{Q}' holds values that are not finite"):
        checkpoint.read("q", 1)


def test_truncated_file_names_the_tensor(tmp_path: Path) -> None:
    directory = tiny_llama_dir(tmp_path)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        ModelLoadError, match=r"model\.safetensors: cut off: tensor '[a-z_.0-9]+' needs bytes"
    ):
        open_checkpoint(directory)


def test_old_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    open_checkpoint(edit(tiny_llama_dir(tmp_path), lambda t: t.update({name: np.ones(8, np.float32)})))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("with_head", [True, False])
def test_heads(tmp_path: Path, tied: bool, with_head: bool) -> None:
    directory = write_directory(tmp_path, llama_config(tied=tied), with_head=with_head)
    if not tied and not with_head:
        with pytest.raises(
            ModelLoadError, match=r"tensor 'lm_head\.weight' is missing .*tie_word_embeddings"
        ):
            open_checkpoint(directory)
        return
    checkpoint = open_checkpoint(directory)
    assert checkpoint.has_head == with_head
    assert checkpoint.spec.tie_word_embeddings == tied


def test_gguf_without_head_is_tied_and_with_head_is_not(tmp_path: Path) -> None:
    assert read_spec(tiny_llama_gguf(tmp_path)).tie_word_embeddings
    path = write_gguf(tmp_path / "untied.gguf", llama_config(tied=False), tmp_path / "c", with_head=True)
    checkpoint = open_checkpoint(path)
    assert not checkpoint.spec.tie_word_embeddings
    assert checkpoint.has_head


@pytest.mark.parametrize("make", ["llama", "gemma3"])
def test_gguf_and_directory_give_the_same_values(tmp_path: Path, make: str) -> None:
    directory = {"llama": tiny_llama_dir, "gemma3": tiny_gemma3_dir}[make](tmp_path)
    file = {"llama": tiny_llama_gguf, "gemma3": tiny_gemma3_gguf}[make](tmp_path)
    ours, theirs = open_checkpoint(file), open_checkpoint(directory)
    for tensor in decoder_tensors(ours.spec):
        np.testing.assert_array_equal(
            ours.read(tensor.role, tensor.layer), theirs.read(tensor.role, tensor.layer), err_msg=str(tensor)
        )


def test_text_part_of_a_multimodal_gemma(tmp_path: Path) -> None:
    plain = tiny_gemma3_dir(tmp_path / "plain")
    text = json.loads((plain / "config.json").read_text())
    tensors = safetensors.numpy.load_file(plain / "model.safetensors")
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "eos_token_id": [1, 106],
    }
    for prefix in ("language_model.model.", "model.language_model."):
        directory = tmp_path / prefix
        directory.mkdir()
        renamed = {prefix + name.removeprefix("model."): values for name, values in tensors.items()}
        renamed["vision_tower.vision_model.embeddings.patch_embedding.weight"] = np.ones(3, np.float32)
        renamed["multi_modal_projector.mm_input_projection_weight"] = np.ones(3, np.float32)
        safetensors.numpy.save_file(renamed, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(config))
        checkpoint = open_checkpoint(directory)
        assert checkpoint.spec.eos_token_ids == (1, 106)
        assert checkpoint.spec.sliding_window == 32
        expected = random_weights(checkpoint.spec, with_head=False)
        np.testing.assert_array_equal(checkpoint.read("q", 2), expected["q", 2])
        np.testing.assert_array_equal(checkpoint.read("q_norm", 2), expected["q_norm", 2] + 1)


def test_tensors_under_two_prefixes(tmp_path: Path) -> None:
    name = "model.norm.weight"
    twice = edit(tiny_gemma3_dir(tmp_path), lambda t: t.update({"language_model." + name: t[name]}))
    with pytest.raises(ModelLoadError, match="tensors occur twice"):
        open_checkpoint(twice)


def test_gguf_missing_and_misshapen(tmp_path: Path) -> None:
    path = tiny_llama_gguf(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(ModelLoadError, match=r"tensor 'blk\.1\.ffn_up\.weight' is missing"):
        open_checkpoint(path)
    key = b"llama.feed_forward_length" + (4).to_bytes(4, "little")
    path.write_bytes(content.replace(key + (160).to_bytes(4, "little"), key + (128).to_bytes(4, "little")))
    with pytest.raises(ModelLoadError, match=r"tensor 'blk\.0\.ffn_\w+\.weight' has shape"):
        open_checkpoint(path)


def test_paths_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json: cannot be read: No such file"):
        read_spec(tmp_path)
    with pytest.raises(ModelLoadError, match="neither a directory nor"):
        read_spec(tmp_path / "model.bin")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelLoadError, match="not a JSON object"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelLoadError, match="not a JSON object"):
        read_spec(tmp_path)


def test_fingerprint_tells_models_apart(tmp_path: Path) -> None:
    first = tiny_llama_dir(tmp_path / "a")
    prints = {
        "same": fingerprint(first),
        "elsewhere": fingerprint(tiny_llama_dir(tmp_path / "b")),
        "other weights": fingerprint(tiny_llama_dir(tmp_path / "c", seed=1)),
        "gguf": fingerprint(tiny_llama_gguf(tmp_path)),
    }
    assert prints["same"] == prints["elsewhere"]
    assert len(set(prints.values())) == 3

    def nudge(tensors: Tensors) -> None:
        tensors[Q] += np.float32(1e-4)

    assert fingerprint(edit(tiny_llama_dir(tmp_path / "d"), nudge)) != prints["same"]
    assert fingerprint(edit_config(first, rope_theta=10001.0)) != prints["same"]
