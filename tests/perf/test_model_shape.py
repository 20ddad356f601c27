"""Sizes of the model: stated, read, known by name, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ksana.errors import ConfigError
from ksana.perf.model_shape import ModelShape, known_shape, read_meta, read_shape, tables_of


def test_what_is_stated_goes_before_the_file_and_that_before_the_name(tmp_path: Path) -> None:
    model = "meta-llama/Llama-3.1-8B-Instruct"
    assert read_shape(tmp_path, ModelShape(), model).num_layers == 32
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 5, "num_key_value_heads": 2}))
    found = read_shape(tmp_path, ModelShape(kv_heads=3), model)
    assert found == ModelShape(num_layers=5, hidden_size=4096, kv_heads=3, vocab_size=128_256)


def test_layers_that_nothing_tells_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing tells how many new/model has: .* or give --num-layers"):
        read_shape(tmp_path, ModelShape(kv_heads=8), "new/model")
    assert read_shape(tmp_path, ModelShape(num_layers=7), "new/model") == ModelShape(num_layers=7)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", 48),
        ("Qwen/Qwen3-32B", 64),
        ("Qwen/Qwen3-8B-FP8", 36),
        ("meta-llama/Meta-Llama-3.1-8B", 32),
        ("Qwen/Qwen3-8", None),
        ("Qwen/Qwen3-80B", None),
        ("", None),
    ],
)
def test_known_models(name: str, layers: int | None) -> None:
    assert known_shape(name).num_layers == layers


@pytest.mark.parametrize(
    "text", ['{"num_hidden_layers": 0}', '{"hidden_size": "big"}', "[" * 100_000, '{"vocab_size": 1e30}']
)
def test_broken_configs_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_shape(tmp_path, ModelShape(num_layers=1), "")


def test_the_device_and_the_model_of_a_profile(tmp_path: Path) -> None:
    assert (read_meta(tmp_path).gpu, read_meta(tmp_path).model) == ("", "")
    file = tmp_path / "meta.yaml"
    file.write_text("gpu: NVIDIA H100\nmodel: some/model\ntp_degrees: [1, 2]\n")
    assert (read_meta(tmp_path).gpu, read_meta(tmp_path).model) == ("NVIDIA H100", "some/model")
    file.write_text("")
    assert read_meta(tmp_path).gpu == ""


@pytest.mark.parametrize("text", ["gpu: [1]", "- a", "gpu: {", "a: !!python/object:os.system {}", "[" * 5000])
def test_broken_metadata_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "meta.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"meta\.yaml"):
        read_meta(tmp_path)


def test_tables_of_a_share(tmp_path: Path) -> None:
    assert tables_of(tmp_path, 2) == tmp_path
    (tmp_path / "tp1").mkdir()
    (tmp_path / "tp2").mkdir()
    assert tables_of(tmp_path, 2) == tmp_path / "tp2"
    with pytest.raises(ConfigError, match="has tables for tp1, tp2, and none for tp4"):
        tables_of(tmp_path, 4)
