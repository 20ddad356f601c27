"""Which steps ran from captured graphs, as a record says it or leaves it out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ksana.errors import ConfigError
from ksana.perf.graph_settings import GraphSettings, captured_sizes, read_graphs
from ksana.perf.profile_tables import read_profile
from tests.costs.profiles import write_profile


def read(directory: Path, engine: dict[str, Any], compilation: dict[str, Any] | None = None) -> GraphSettings:
    meta = {"engine_kwargs": engine, "resolved_config": {"compilation_config": compilation}}
    (directory / "meta.json").write_text(json.dumps(meta))
    return read_graphs(directory / "meta.json")


def test_recorded_sizes_and_modes(tmp_path: Path) -> None:
    sizes = {"cudagraph_capture_sizes": [8, 1, 4, 0]}
    assert read(tmp_path, {}, sizes) == GraphSettings(sizes=(1, 4, 8), is_known=True)
    for mode, are_whole in (([2, 1], True), (2, True), ("FULL_AND_PIECEWISE", True), (1, False)):
        assert read(tmp_path, {}, {**sizes, "cudagraph_mode": mode}).are_whole == are_whole
    for mode in (0, "NONE", [0, 0]):
        assert read(tmp_path, {}, {**sizes, "cudagraph_mode": mode}) == GraphSettings(is_known=True)
    assert read(tmp_path, {"enforce_eager": True}, sizes) == GraphSettings(is_known=True)


def test_sizes_that_a_record_lacks_are_those_its_engine_takes(tmp_path: Path) -> None:
    assert captured_sizes(128) == (1, 2, 4, *range(8, 257, 8))
    assert captured_sizes(256)[-3:] == (480, 496, 512)
    assert captured_sizes(1) == (1, 2)
    assert read(tmp_path, {"max_num_seqs": 16}).sizes == (1, 2, 4, 8, 16, 24, 32)
    assert read(tmp_path, {}) == GraphSettings()
    assert read_graphs(tmp_path / "missing.json") == GraphSettings()


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"engine_kwargs": {"max_num_seqs": -1}}'])
def test_broken_settings_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(ConfigError, match=r"meta\.json"):
        read_graphs(tmp_path / "meta.json")


def test_an_engine_without_graphs_launches_every_kernel(tmp_path: Path) -> None:
    write_profile(tmp_path)
    read(tmp_path, {"enforce_eager": True})
    tables = read_profile(tmp_path, num_layers=3)
    assert tables.padded_sizes == ()
    assert tables.launches.none_us > 0
    read(tmp_path, {"max_num_seqs": 8}, {"cudagraph_mode": 1})
    piecewise = read_profile(tmp_path, num_layers=3).launches
    assert piecewise.full_us == piecewise.piecewise_us
