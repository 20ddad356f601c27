"""What launching takes: counted from the tables, or measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from ksana.costs.launches import Launches
from ksana.costs.profile_cost import LayerTable
from ksana.errors import ConfigError
from ksana.perf.launch_times import GRAPH_SAVES_US, HOST_US, launch_times
from ksana.perf.profile_tables import read_profile
from tests.costs.profiles import write_profile


def layer(name: str, per_step: int) -> LayerTable:
    return LayerTable(name=name, per_step=per_step, sizes=(1,), us=(1.0,))


LAYERS = (layer("qkv_proj", 10), layer("layernorm", 20), layer("lm_head", 1))
"""Of ten decoder layers: with two kernels of attention each, 51 kernels."""


def test_kernels_are_counted(tmp_path: Path) -> None:
    launches = launch_times(10, LAYERS, tmp_path / "step.csv")
    assert launches.full_us == pytest.approx(-51 * GRAPH_SAVES_US)
    assert launches.none_us == pytest.approx(51 * HOST_US)
    # 20 kernels of attention and 11 graphs between them are launched; 31 kernels are in the graphs.
    assert launches.piecewise_us == pytest.approx(31 * HOST_US - 31 * GRAPH_SAVES_US)


def test_what_was_measured_with_graphs_counts(tmp_path: Path) -> None:
    file = tmp_path / "step.csv"
    rows = ["full,8,120.0", "full,16,140.0", "full,32,500.0", "piecewise,64,50", "none,999,-3"]
    file.write_text("\n".join(["branch,num_tokens,saved_us", *rows]))
    launches = launch_times(10, LAYERS, file)
    assert launches.full_us == -140
    assert launches.piecewise_us == pytest.approx(31 * HOST_US - 50)


@pytest.mark.parametrize("row", ["full,8", "full,8,fast", "full,8,nan", "full,8,1e300"])
def test_broken_measurements_are_refused(tmp_path: Path, row: str) -> None:
    (tmp_path / "step.csv").write_text(f"branch,num_tokens,saved_us\n{row}")
    with pytest.raises(ConfigError, match=r"step\.csv, line 2"):
        launch_times(10, LAYERS, tmp_path / "step.csv")


def test_tables_of_an_engine_that_nothing_is_known_of_have_no_launches(tmp_path: Path) -> None:
    write_profile(tmp_path)
    assert read_profile(tmp_path, num_layers=3).launches == Launches()
    write_profile(tmp_path, padded_sizes=(1, 2))
    assert read_profile(tmp_path, num_layers=3).launches.none_us > 0
