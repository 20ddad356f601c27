"""GGUF files: what the format allows is read exactly, what is broken or hostile is named and refused."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ksana.errors import ModelLoadError
from ksana.models.gguf_file import READABLE_TYPES, GgufFile
from tests.models_for_tests import tiny_llama_gguf

QUANTIZABLE = [name for name in READABLE_TYPES if not name.endswith("_K")]


def write_one(path: Path, values: np.ndarray, type_name: str) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    ggml_type = gguf.GGMLQuantizationType[type_name]
    writer.add_tensor("x", gguf.quants.quantize(values, ggml_type), raw_dtype=ggml_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("type_name", QUANTIZABLE)
def test_values_survive_storage(tmp_path: Path, type_name: str) -> None:
    values = np.random.default_rng(1).normal(size=(8, 256)).astype(np.float32)
    file = GgufFile(write_one(tmp_path / "one.gguf", values, type_name))
    assert file.tensors["x"].shape == (8, 256)
    assert file.tensors["x"].type_name == type_name
    read = file.read("x")
    assert read.dtype == np.float32
    tolerance = {"F32": 0, "F16": 2e-3, "BF16": 2e-2, "Q8_0": 2e-2, "Q5_0": 0.2, "Q5_1": 0.2, "Q4_0": 0.4}
    np.testing.assert_allclose(read, values, atol=tolerance.get(type_name, 0.3))


@pytest.mark.parametrize("type_name", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_read_as_the_format_defines_them(tmp_path: Path, type_name: str) -> None:
    # All scales 1, all minima 0, every quant the same: the value is known by hand.
    one = np.float16(1.0).tobytes()
    if type_name == "Q6_K":  # 128 low bits, 64 high bits, 16 scales, d; value = d * scale * (q - 32)
        block = bytes([0x11] * 128) + bytes(64) + bytes([2] * 16) + one
        expected = 2.0 * (1 - 32)
    else:  # d, dmin, 12 bytes of 6-bit scales and minima, [high bits], low bits; value = d * scale * q - 0
        scales = bytes([3] * 4 + [0] * 4 + [3] * 4)
        high = bytes(32) if type_name == "Q5_K" else b""
        block = one + bytes(2) + scales + high + bytes([0x55] * 128)
        expected = 3.0 * 5
    path = tmp_path / "k.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    raw = np.frombuffer(block, np.uint8).reshape(1, -1)
    writer.add_tensor("x", raw, raw_dtype=gguf.GGMLQuantizationType[type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert set(GgufFile(path).read("x").ravel().tolist()) == {expected}


def test_unreadable_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "q2.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("x", np.zeros((1, 84), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q2_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"q2\.gguf: tensor 'x' has type Q2_K"):
        GgufFile(path).read("x")


def test_metadata_of_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "meta.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint32("a.number", 7)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "größe")
    writer.add_array("a.words", ["one", "", "drei"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(path)
    assert [file.get(f"a.{key}") for key in ("number", "float", "flag", "text")] == [7, 0.5, True, "größe"]
    assert file.get("a.words") == ["one", "", "drei"]
    assert file.get("a.numbers") == [1, 2, 3]
    assert file.array_length("a.words") == 3
    assert file.array_length("a.number") is None
    assert file.get("a.absent", "default") == "default"


def test_cut_off_anywhere_is_an_error_or_leaves_whole_tensors(tmp_path: Path) -> None:
    whole = tiny_llama_gguf(tmp_path).read_bytes()
    path = tmp_path / "cut.gguf"
    data_start = min(t.offset for t in GgufFile(tmp_path / "tiny-llama-F32.gguf").tensors.values())
    for length in [*range(0, data_start, 97), data_start + 5, len(whole) - 4096]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
            GgufFile(path)


def test_cut_off_names_the_tensor(tmp_path: Path) -> None:
    path = tiny_llama_gguf(tmp_path)
    last = max(GgufFile(path).tensors.values(), key=lambda tensor: tensor.offset)
    path.write_bytes(path.read_bytes()[: last.offset + 10])
    with pytest.raises(ModelLoadError, match=f"cut off: tensor '{last.name}' needs bytes"):
        GgufFile(path)


HUGE = 1 << 62


@pytest.mark.parametrize(
    "body",
    [
        struct.pack("<IQQ", 3, HUGE, 0),
        struct.pack("<IQQ", 3, 0, HUGE),
        struct.pack("<IQQQ", 3, 0, 1, HUGE) + b"key",
        struct.pack("<IQQQ1sIQ", 3, 0, 1, 1, b"k", 8, HUGE),
        struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, HUGE),
        struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, HUGE),
        struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1) + bytes(64),
        struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", HUGE & 0xFFFF),
        struct.pack("<IQQQ1sIQQIQ", 3, 1, 0, 1, b"t", 2, HUGE, HUGE, 0, 0),
        struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 4, 0, HUGE),
        struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 4, 9999, 0),
        struct.pack(">IQQ", 3, 0, 0),
        struct.pack("<IQQ", 1, 0, 0),
    ],
)
def test_hostile_headers_are_refused_without_allocating(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(b"GGUF" + body)
    with pytest.raises(ModelLoadError, match=r"hostile\.gguf"):
        GgufFile(path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_never_escape_as_other_errors(tmp_path: Path, data: st.DataObject) -> None:
    source = tmp_path / "tiny-llama-F32.gguf"
    if not source.exists():
        tiny_llama_gguf(tmp_path)
    content = bytearray(source.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 12_000))] = data.draw(st.integers(0, 255))
    path = tmp_path / "flipped.gguf"
    path.write_bytes(content)
    try:
        file = GgufFile(path)
        for key in file.metadata_keys():
            file.get(key)
        for name in file.tensors:
            file.read(name)
    except ModelLoadError:
        pass


def test_not_gguf(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04 a zip file")
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        GgufFile(tmp_path / "x.gguf")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"empty\.gguf: cannot be read"):
        GgufFile(tmp_path / "empty.gguf")
    with pytest.raises(ModelLoadError, match=r"absent\.gguf: cannot be read"):
        GgufFile(tmp_path / "absent.gguf")
