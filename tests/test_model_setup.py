from pathlib import Path

import pytest

from ksana.config import Settings
from ksana.errors import ConfigError
from ksana.model_setup import available_memory_bytes, default_kv_bytes, model_name, set_up

from .engines import model_files
from .models_for_tests import tiny_gemma3_dir, tiny_llama_dir


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("org/Model-1B", "Model-1B"),
        ("org/Model-1B@main:Q4_K_M", "Model-1B"),
        ("/models/some.Q4_1.gguf", "some.Q4_1"),
        ("/models/dir/", "dir"),
    ],
)
def test_names(model: str, name: str) -> None:
    assert model_name(model) == name


def test_a_directory_that_exists_keeps_its_whole_name(tmp_path: Path) -> None:
    (tmp_path / "a@b:c").mkdir()
    assert model_name(str(tmp_path / "a@b:c")) == "a@b:c"


def test_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemAvailable:     50 kB\n")
    assert available_memory_bytes(meminfo) == 50 * 1024
    assert available_memory_bytes() > 0
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        available_memory_bytes(tmp_path / "none")
    assert default_kv_bytes(8 << 30) == 2 << 30
    assert default_kv_bytes(100 << 30) == 4 << 30


def test_each_part_is_told_the_same_numbers(tmp_path: Path) -> None:
    files = model_files(tiny_gemma3_dir(tmp_path))
    settings = Settings(
        model="x",
        max_model_len=512,
        kv_cache_memory="8MiB",
        max_num_batched_tokens=64,
        served_model_name="me",
    )
    setup = set_up(settings, files)
    cache, worker = setup.cache_config(), setup.worker_settings()
    assert cache.num_fa_blocks == worker.num_fa_blocks == setup.pools.num_fa_blocks
    assert cache.num_swa_blocks == worker.num_swa_blocks > 0
    assert cache.sliding_window == 32
    assert setup.pools.kv_bytes <= 8 << 20
    scheduler = setup.scheduler_settings()
    assert scheduler.max_model_len == worker.max_model_len == 512
    assert scheduler.plan_ahead == cache.plan_ahead


def test_lengths(tmp_path: Path) -> None:
    files = model_files(tiny_llama_dir(tmp_path))
    whole = set_up(Settings(model="x", kv_cache_memory="64MiB"), files)
    assert whole.max_model_len == files.spec.max_position == 2048
    with pytest.raises(ConfigError, match="4096"):
        set_up(Settings(model="x", max_model_len=4096), files)
    with pytest.raises(ConfigError, match="not a size"):
        set_up(Settings(model="x", kv_cache_memory="lots"), files)
    with pytest.raises(ConfigError, match="largest --max-model-len that fits"):
        set_up(Settings(model="x", kv_cache_memory="1MiB", max_num_batched_tokens=64), files)
