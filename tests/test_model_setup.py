from pathlib import Path

import pytest

from ksana.config import Settings
from ksana.errors import ConfigError
from ksana.model_setup import decide_kv_bytes, find_model, model_name, set_up

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


def test_memory_of_the_pools() -> None:
    assert decide_kv_bytes(None, 8 << 30) == 2 << 30
    assert decide_kv_bytes(None, 100 << 30) == 4 << 30
    assert decide_kv_bytes("8GiB", 8 << 30) == decide_kv_bytes("8GiB", None) == 8 << 30
    with pytest.raises(ConfigError, match=r"asks for 8\.50 GiB, but only 8\.00 GiB of memory are free"):
        decide_kv_bytes("8.5GiB", 8 << 30)
    with pytest.raises(ConfigError, match="give --kv-cache-memory"):
        decide_kv_bytes(None, None)


def test_more_than_there_is_is_refused_before_a_worker_exists(tmp_path: Path) -> None:
    files = model_files(tiny_llama_dir(tmp_path))
    with pytest.raises(ConfigError, match=r"asks for 100 TiB, but only .* are free"):
        set_up(Settings(model="x", kv_cache_memory="100TiB"), files)
    staging = Settings(model="x", remote_cache="file:///nowhere", remote_cache_staging=100 << 40)
    with pytest.raises(ConfigError, match="remote_cache_staging asks for 100 TiB"):
        set_up(staging, files)


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


@pytest.mark.parametrize(
    ("load_s", "find_s", "fetch_s", "save_s"), [(1, 1, 2, 10), (5, 1, 2, 10), (60, 12, 24, 120)]
)
def test_a_store_that_may_be_slow_is_given_time_for_each_order(
    load_s: int, find_s: float, fetch_s: float, save_s: float, tmp_path: Path
) -> None:
    settings = Settings(model="x", remote_cache="file:///nowhere", remote_cache_timeout=load_s)
    loader = set_up(settings, model_files(tiny_llama_dir(tmp_path))).loader_settings(num_slots=8)
    assert (loader.find_timeout_s, loader.fetch_timeout_s, loader.save_timeout_s) == (find_s, fetch_s, save_s)


def test_lengths(tmp_path: Path) -> None:
    files = model_files(tiny_llama_dir(tmp_path))
    whole = set_up(Settings(model="x", kv_cache_memory="64MiB"), files)
    assert whole.max_model_len == files.spec.max_position == 2048
    with pytest.raises(ConfigError, match="4096"):
        set_up(Settings(model="x", max_model_len=4096), files)
    with pytest.raises(ConfigError, match="a size in bytes"):
        set_up(Settings(model="x", kv_cache_memory="lots"), files)
    with pytest.raises(ConfigError, match="largest --max-model-len that fits"):
        set_up(Settings(model="x", kv_cache_memory="1MiB", max_num_batched_tokens=64), files)


def test_kv_is_shared_only_between_models_with_every_byte_equal(tmp_path: Path) -> None:
    directory = tiny_llama_dir(tmp_path)
    settings = Settings(model=str(directory), remote_cache="file:///nowhere", kv_cache_memory="4MiB")

    def identity() -> bytes:
        return set_up(settings, find_model(settings, lambda _text: None)).kv_identity()

    before = identity()
    assert identity() == before
    weights = directory / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[len(raw) // 2 + 1] ^= 1
    weights.write_bytes(raw)
    assert identity() != before
