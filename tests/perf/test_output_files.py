from __future__ import annotations

import os
from pathlib import Path

import pytest

from ksana.errors import ConfigError
from ksana.perf.output_files import check_can_write, check_outputs


def test_whether_a_file_can_be_written_is_known_before(tmp_path: Path) -> None:
    check_can_write("output_file", tmp_path / "r.json")
    assert os.listdir(tmp_path) == []
    with pytest.raises(ConfigError, match=r"^output_file .*cannot be written: No such file or directory"):
        check_can_write("output_file", tmp_path / "missing" / "r.json")
    with pytest.raises(ConfigError, match=r"^--cost-file .* is a directory"):
        check_can_write("--cost-file", tmp_path)


def test_pipes_and_devices_are_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=r"^output_file .* is no regular file"):
        check_can_write("output_file", pipe)


def test_nothing_that_is_read_is_replaced(tmp_path: Path) -> None:
    asked, result, cost = (tmp_path / name for name in ("batches.json", "r.json", "c.json"))
    asked.write_text("{}")
    check_outputs({"batches": asked, "config": asked}, {"output": result, "cost": cost})
    with pytest.raises(ConfigError, match=r"output .* would replace the batches"):
        check_outputs({"batches": asked}, {"output": tmp_path / "." / "batches.json"})
    with pytest.raises(ConfigError, match=r"cost .* would replace the output"):
        check_outputs({"batches": asked}, {"output": result, "cost": result})
    (tmp_path / "link").symlink_to(asked)
    with pytest.raises(ConfigError, match=r"output .* would replace the batches"):
        check_outputs({"batches": asked}, {"output": tmp_path / "link"})
