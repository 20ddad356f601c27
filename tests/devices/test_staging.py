import errno
import mmap
import os
from pathlib import Path

import pytest
import torch

from ksana.devices.runner import ModelRunner
from ksana.devices.staged_blocks import StagedBlocks
from ksana.devices.staging import MAX_SLOTS, StagingMemory, plan_slots
from ksana.errors import ConfigError, InvariantViolated
from ksana.messages.staging import CopyFromStaging, CopyToStaging, StagedBlock, StagingCopied
from ksana.models.batch import KvCache
from ksana.models.loader import load_model
from tests.tiny_models import gemma3_config, llama_config, write_directory

from .test_runner import FakeModel, spec


def test_slots_hold_a_block_of_either_pool() -> None:
    assert plan_slots(1000, 100, 65) == (7, 128)
    assert plan_slots(512, 128, 0) == (4, 128)
    assert plan_slots(1 << 30, 1, 0) == (MAX_SLOTS, 64)
    with pytest.raises(ConfigError, match=r"512 B holds 2 KV blocks of 256 B; .* 4 are needed: 1.00 KiB"):
        plan_slots(512, 200)


def test_who_attaches_sees_the_same_bytes() -> None:
    memory = StagingMemory.create(4, 128)
    other = StagingMemory.attach(memory.area)
    memory.slot(2, 3)[:] = b"abc"
    assert bytes(other.slot(2, 4)) == b"abc\0"
    other.slot(3, 128)[:] = bytes(range(128))
    assert bytes(memory.slot(3, 128)) == bytes(range(128))
    assert bytes(memory.slot(1, 128)) == bytes(128)
    other.close()
    memory.close()
    memory.close()
    with pytest.raises(OSError, match="Bad file descriptor") as error:
        os.fstat(memory.area.fd)
    assert error.value.errno == errno.EBADF


@pytest.mark.parametrize(("index", "num_bytes"), [(-1, 1), (4, 1), (0, 129), (0, -1)])
def test_nothing_outside_a_slot_can_be_had(index: int, num_bytes: int) -> None:
    memory = StagingMemory.create(4, 128)
    with pytest.raises(InvariantViolated, match="there are 4 slots of 128 bytes"):
        memory.slot(index, num_bytes)
    memory.close()


def test_a_worker_cannot_take_the_memory_away() -> None:
    memory = StagingMemory.create(4, mmap.PAGESIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.area.fd, 0)
    memory.close()


def test_memory_that_is_not_to_be_had() -> None:
    with pytest.raises(ConfigError, match="--remote-cache-staging"):
        StagingMemory.create(1 << 40, 1 << 22)


def staged(pool: str, block_id: int, slot: int) -> StagedBlock:
    return StagedBlock(pool=pool, block_id=block_id, slot=slot)  # type: ignore[arg-type]


def to_slots(*blocks: StagedBlock, copy_id: int = 1) -> CopyToStaging:
    return CopyToStaging(pool_epoch=1, copy_id=copy_id, blocks=blocks)


def from_slots(*blocks: StagedBlock, copy_id: int = 2) -> CopyFromStaging:
    return CopyFromStaging(pool_epoch=1, copy_id=copy_id, blocks=blocks)


@pytest.mark.parametrize("config", [llama_config(), gemma3_config()], ids=["llama", "gemma3"])
def test_blocks_go_out_and_come_back_bit_for_bit(tmp_path: Path, config: dict[str, object]) -> None:
    """KV of every bit pattern, NaN and all, through the runner that serves."""
    model = load_model(write_directory(tmp_path, config, with_head=True))
    num_blocks = 6
    kv = KvCache.allocate(model.spec, num_blocks, num_blocks, block_size=8)
    generator = torch.Generator().manual_seed(1)
    for cache in (*kv.keys, *kv.values):
        bits = torch.randint(-(2**31), 2**31 - 1, cache.shape, dtype=torch.int32, generator=generator)
        cache.copy_(bits.view(torch.float32))
    block_bytes = [8 * model.spec.kv_bytes_per_token(kind, 4) for kind in ("full", "sliding")]
    memory = StagingMemory.create(*plan_slots(4 * (max(block_bytes) + 64), *block_bytes))
    runner = ModelRunner(
        model, kv, num_fa_blocks=num_blocks, num_swa_blocks=num_blocks, max_model_len=48, staging=memory
    )
    kinds = {"full": ("fa", 1, 4, 2), "sliding": ("swa", 5, 0, 1)}
    for kind, (pool, source, destination, slot) in kinds.items():
        if kind not in model.spec.layer_kinds:
            continue
        before = [cache.clone() for cache in (*kv.keys, *kv.values)]
        done = runner.copy_staged(to_slots(staged(pool, source, slot)))
        assert done == StagingCopied(pool_epoch=1, copy_id=1)
        layers = [layer for layer, k in enumerate(model.spec.layer_kinds) if k == kind]
        expected = b"".join(
            cache[source].numpy().tobytes() for i in layers for cache in (kv.keys[i], kv.values[i])
        )
        num_bytes = 8 * model.spec.kv_bytes_per_token(kind, 4)  # type: ignore[arg-type]
        assert bytes(memory.slot(slot, num_bytes)) == expected
        runner.copy_staged(from_slots(staged(pool, destination, slot)))
        for number, cache in enumerate((*kv.keys, *kv.values)):
            layer = number % len(kv.keys)
            for block in range(num_blocks):
                moved = model.spec.layer_kinds[layer] == kind and block == destination
                wanted = before[number][source if moved else block]
                assert cache[block].numpy().tobytes() == wanted.numpy().tobytes()


def fake_runner(kinds: tuple[str, ...] = ("full", "sliding"), staging: bool = True) -> ModelRunner:
    model = FakeModel(kinds)  # type: ignore[arg-type]
    kv = KvCache.allocate(model.spec, 4, 3, 4)
    memory = StagingMemory.create(4, 64) if staging else None
    return ModelRunner(model, kv, num_fa_blocks=4, num_swa_blocks=3, max_model_len=64, staging=memory)


@pytest.mark.parametrize(
    "bad",
    [staged("fa", 4, 0), staged("fa", -1, 0), staged("swa", 3, 0), staged("fa", 0, 4), staged("fa", 0, -1)],
)
def test_out_of_bounds_is_refused_before_anything_is_copied(bad: StagedBlock) -> None:
    runner = fake_runner()
    runner._kv.keys[0].fill_(7)
    with pytest.raises(InvariantViolated, match="copy between staging slot"):
        runner.copy_staged(to_slots(staged("fa", 0, 1), bad))
    runner.copy_staged(from_slots(staged("fa", 1, 1)))
    assert runner._kv.keys[0][1].count_nonzero() == 0, "slot 1 was written"


def test_a_pool_without_layers_has_no_blocks() -> None:
    with pytest.raises(InvariantViolated, match="swa block 0 of 0"):
        fake_runner(("full",)).copy_staged(to_slots(staged("swa", 0, 0)))


def test_a_worker_without_staging_memory_refuses() -> None:
    with pytest.raises(InvariantViolated, match="without staging memory"):
        fake_runner(staging=False).copy_staged(to_slots(staged("fa", 0, 0)))


def test_blocks_larger_than_a_slot_are_found_at_the_start() -> None:
    kv = KvCache.allocate(spec(("full",)), 4, 4, block_size=16)
    memory = StagingMemory.create(4, 64)
    with pytest.raises(InvariantViolated, match="128 bytes of staging slot 0"):
        StagedBlocks(memory, kv, {"fa": [0], "swa": []})
