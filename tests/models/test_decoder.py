"""The decoder on tiny random models: batches, chunks, windows, tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ksana.models.batch import KvCache
from ksana.models.decoder import Model
from ksana.models.loader import load_model
from tests.models.paged_driver import PagedDriver
from tests.models_for_tests import tiny_gemma3_dir, tiny_llama_dir
from tests.tiny_models import VOCAB_SIZE, llama_config, write_directory

MAKERS: dict[str, Callable[[Path], Path]] = {"llama": tiny_llama_dir, "gemma3": tiny_gemma3_dir}


@pytest.fixture(scope="module", params=list(MAKERS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(MAKERS[request.param](tmp_path_factory.mktemp("model")))


def random_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
def test_bits_do_not_depend_on_the_chunk(model: Model, chunk: int) -> None:
    ids = random_ids(100)
    whole = PagedDriver(model, 1, 100).all_logits(ids, 100)
    assert torch.equal(PagedDriver(model, 1, 100).all_logits(ids, chunk), whole)


def test_bits_do_not_depend_on_the_batch(model: Model) -> None:
    prompts = {row: random_ids(3 + 11 * row, seed=row) for row in range(8)}
    together = PagedDriver(model, 8, 128)
    logits = [together.step(prompts), together.step({row: [row + 1] for row in prompts})]
    for row, prompt in prompts.items():
        alone = PagedDriver(model, 1, 128, block_size=8)
        assert torch.equal(alone.step({0: prompt})[0], logits[0][row])
        assert torch.equal(alone.step({0: [row + 1]})[0], logits[1][row])


def test_block_size_does_not_matter(model: Model) -> None:
    ids = random_ids(50)
    whole = PagedDriver(model, 1, 50, block_size=16).all_logits(ids, 13)
    assert torch.equal(PagedDriver(model, 1, 50, block_size=4).all_logits(ids, 50), whole)


def test_only_wanted_logits_and_none_at_all(model: Model) -> None:
    ids = random_ids(20)
    driver = PagedDriver(model, 1, 32)
    expected = driver.all_logits(ids, 20)
    batch = PagedDriver(model, 1, 32).batch({0: ids}, logits_of_all=True)
    for wanted in ([], [3], [19, 0, 3]):
        batch.logit_indices = torch.tensor(wanted, dtype=torch.int64)
        logits = model.forward(batch, driver.kv)
        assert logits.shape == (len(wanted), VOCAB_SIZE)
        assert torch.equal(logits, expected[wanted])


def test_tokens_outside_of_every_window_are_not_read(tmp_path: Path) -> None:
    model = load_model(tiny_gemma3_dir(tmp_path))
    ids = random_ids(100)
    expected = PagedDriver(model, 1, 112).all_logits(ids, 100)[-1]
    driver = PagedDriver(model, 1, 112)
    driver.step({0: ids[:-1]})
    last_unseen_block = (100 - 32) // 16  # the blocks before hold positions below 99 - 32 + 1 only
    for layer, kind in enumerate(model.spec.layer_kinds):
        if kind == "sliding":
            freed = driver.tables[0, :last_unseen_block].long()
            driver.kv.keys[layer][freed] = float("nan")
            driver.kv.values[layer][freed] = float("nan")
    assert torch.equal(driver.step({0: ids[-1:]})[0], expected)


def test_window_counts_the_token_itself(tmp_path: Path) -> None:
    """Layer 0 is sliding: a change of key p reaches what layer 0 says at p + 31, not at p + 32."""
    model = load_model(tiny_gemma3_dir(tmp_path))
    attention = model.layers[0].attention
    assert attention.window == 32
    ids = random_ids(80)
    changed = [*ids[:10], (ids[10] + 1) % VOCAB_SIZE, *ids[11:]]
    seen = []
    for tokens in (ids, changed):
        driver = PagedDriver(model, 1, 80)
        batch = driver.batch({0: tokens}, logits_of_all=True)
        x = model.embedding[batch.token_ids]
        seen.append(attention(x, batch, driver.kv))
    differs = (seen[0] != seen[1]).any(-1).nonzero().ravel().tolist()
    assert differs == list(range(10, 42))


def test_pools_have_their_own_sizes(tmp_path: Path) -> None:
    spec = load_model(tiny_gemma3_dir(tmp_path)).spec
    kv = KvCache.allocate(spec, num_fa_blocks=5, num_swa_blocks=3, block_size=8)
    shapes = [tuple(keys.shape) for keys in kv.keys]
    assert shapes == [(3, 1, 8, 32)] * 5 + [(5, 1, 8, 32)]
    num_bytes = sum(t.nbytes for t in [*kv.keys, *kv.values])
    full, sliding = (spec.kv_bytes_per_token(kind, 4) for kind in ("full", "sliding"))
    assert num_bytes == 5 * 8 * full + 3 * 8 * sliding


def test_positions_beyond_the_tables_are_refused(tmp_path: Path) -> None:
    model = load_model(tiny_llama_dir(tmp_path), max_positions=10)
    driver = PagedDriver(model, 1, 16)
    driver.step({0: random_ids(10)})
    with pytest.raises(ValueError, match="position 10 of token 0"):
        driver.step({0: [1]})


def test_progress_reaches_the_total(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_model(tiny_llama_dir(tmp_path, tied=False), lambda done, total: calls.append((done, total)))
    total = 3 + 3 * 9
    assert calls == [(done, total) for done in range(1, total + 1)]


def test_a_stored_head_counts_even_if_tied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    untied = load_model(write_directory(tmp_path / "a", llama_config(tied=False), with_head=True))
    contradictory = load_model(write_directory(tmp_path / "b", llama_config(tied=True), with_head=True))
    ids = random_ids(5)
    expected, ours = (PagedDriver(model, 1, 16).all_logits(ids, 5) for model in (untied, contradictory))
    assert torch.equal(ours, expected)
    assert "the stored output head differs from the embedding" in caplog.text
