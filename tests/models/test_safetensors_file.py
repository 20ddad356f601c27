"""Safetensors: single files and shards, dtypes, and everything that can be wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ksana.errors import ModelLoadError
from ksana.models.safetensors_file import INDEX_NAME, SafetensorsFile, open_directory


def write_raw(path: Path, header: object, data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def write_shards(directory: Path) -> dict[str, np.ndarray]:
    values = {name: np.full((2, 3), index, np.float32) for index, name in enumerate("abcd")}
    weight_map = {}
    for shard, names in enumerate(("ab", "cd"), start=1):
        file_name = f"model-{shard:05}-of-00002.safetensors"
        safetensors.numpy.save_file({name: values[name] for name in names}, directory / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return values


def test_dtypes_become_float32(tmp_path: Path) -> None:
    values = np.array([[1.5, -2.0, 3.25e-3], [0.0, 65504.0, 1.0]], np.float32)
    bfloat16 = (values.view(np.uint32) >> 16).astype(np.uint16)
    half = values.astype(np.float16)
    data = values.tobytes() + half.tobytes() + bfloat16.tobytes()
    header = {
        "f32": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "f16": {"dtype": "F16", "shape": [2, 3], "data_offsets": [24, 36]},
        "bf16": {"dtype": "BF16", "shape": [3, 2], "data_offsets": [36, 48]},
        "__metadata__": {"format": "pt"},
    }
    file = SafetensorsFile(write_raw(tmp_path / "x.safetensors", header, data))
    np.testing.assert_array_equal(file.read("f32"), values)
    np.testing.assert_array_equal(file.read("f16"), half.astype(np.float32))
    truncated = (bfloat16.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(file.read("bf16"), truncated.reshape(3, 2))
    assert set(file.tensors) == {"f32", "f16", "bf16"}


def test_other_dtypes_are_named(tmp_path: Path) -> None:
    header = {"q": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}
    file = SafetensorsFile(write_raw(tmp_path / "x.safetensors", header, bytes(4)))
    with pytest.raises(ModelLoadError, match=r"x\.safetensors: tensor 'q' has dtype F8_E4M3"):
        file.read("q")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]},
        {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
        {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]},
        {"shape": [2], "data_offsets": [0, 8]},
        [1, 2],
    ],
)
def test_wrong_descriptions_name_the_tensor(tmp_path: Path, entry: object) -> None:
    path = write_raw(tmp_path / "x.safetensors", {"t": entry}, bytes(8))
    with pytest.raises(ModelLoadError, match=r"x\.safetensors: .*tensor 't'"):
        SafetensorsFile(path)


def test_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for content in (b"", b"abc", (1 << 62).to_bytes(8, "little") + b"{}", (3).to_bytes(8, "little") + b"[1]"):
        path.write_bytes(content)
        with pytest.raises(ModelLoadError, match=r"x\.safetensors"):
            SafetensorsFile(path)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_never_escape_as_other_errors(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"a": np.zeros((2, 2), np.float32), "b": np.ones(3, np.float16)}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        file = SafetensorsFile(path)
        for name in file.tensors:
            file.read(name)
    except ModelLoadError:
        pass


def test_shards_and_stray_files(tmp_path: Path) -> None:
    values = write_shards(tmp_path)
    safetensors.numpy.save_file({"stray": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "consolidated.safetensors").write_bytes(b"broken")
    found = open_directory(tmp_path)
    assert set(found) == set(values)
    for name, file in found.items():
        np.testing.assert_array_equal(file.read(name), values[name])


def test_missing_and_wrong_shards_are_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    second = tmp_path / "model-00002-of-00002.safetensors"
    safetensors.numpy.save_file({"c": np.zeros(1, np.float32)}, second)
    with pytest.raises(ModelLoadError, match=r"00002-of-00002\.safetensors: tensor 'd' is missing"):
        open_directory(tmp_path)
    second.unlink()
    with pytest.raises(
        ModelLoadError, match=r"00002-of-00002\.safetensors: missing; it should hold tensor 'c'"
    ):
        open_directory(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "model.bin", ""])
def test_index_cannot_point_elsewhere(tmp_path: Path, name: str) -> None:
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelLoadError, match="is not the plain name of a safetensors file"):
        open_directory(tmp_path)


@pytest.mark.parametrize("text", ["null", "[]", "{", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_broken_index(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(ModelLoadError, match=INDEX_NAME):
        open_directory(tmp_path)


def test_no_weights_pickled_weights_several_files(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no model\.safetensors"):
        open_directory(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelLoadError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        open_directory(tmp_path)
    safetensors.numpy.save_file({"a": np.zeros(1, np.float32)}, tmp_path / "weights.safetensors")
    assert set(open_directory(tmp_path)) == {"a"}
    safetensors.numpy.save_file({"b": np.zeros(1, np.float32)}, tmp_path / "adapter.safetensors")
    with pytest.raises(ModelLoadError, match="2 safetensors files"):
        open_directory(tmp_path)
