"""Real models against transformers, by the kept files of `python -m tests.make_references`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ksana.models.decoder import Model
from ksana.models.loader import load_model
from tests.make_references import MODELS, NUM_LONG, NUM_NEW, greedy_tokens, sampled_ids
from tests.models.paged_driver import PagedDriver
from tests.models.references import Reference, read_reference
from tests.models_for_tests import gemma3_gguf, smollm2_directory, smollm2_gguf, smollm2_variant_gguf

NEAR_TIE, NEAR_TIE_SHARE = 1e-4, 0.01
LOGIT_TOLERANCE = 1e-3


@dataclass
class Case:
    model: Model
    reference: Reference


LOADERS: dict[str, Callable[[], Path]] = {"smollm2": smollm2_gguf, "gemma3": gemma3_gguf}


@pytest.fixture(scope="module", params=list(LOADERS))
def case(request: pytest.FixtureRequest) -> Case:
    return Case(load_model(LOADERS[request.param](), max_positions=2048), read_reference(request.param))


def check_greedy(model: Model, reference: Reference) -> int:
    """Our greedy tokens are the reference's best or tie with it; returns how many only tie.

    A row that takes the other side of a near-tie goes on from there differently: what follows in it is not
    in the reference and not compared.
    """
    longest = max(map(len, reference.prompts)) + NUM_NEW
    ours = greedy_tokens(PagedDriver(model, len(reference.prompts), longest), reference.prompts, NUM_NEW)
    near_ties = 0
    for row, tokens in enumerate(ours):
        for step, token in enumerate(tokens):
            best, second = reference.best_logits[row, step]
            if token != reference.best_ids[row, step, 0]:
                near_ties += 1
                assert token == reference.best_ids[row, step, 1], (row, step)
                assert best - second <= NEAR_TIE, (row, step)
            if token != reference.chosen[row, step]:
                break
    return near_ties


def long_difference(model: Model, reference: Reference, chunk: int, every: int = 1) -> Tensor:
    """Largest difference of the kept logits, per position (0 where `every` left one out)."""
    driver = PagedDriver(model, 1, NUM_LONG)
    sampled = sampled_ids(model.spec.vocab_size)
    differences = torch.zeros(NUM_LONG)
    for start in range(0, NUM_LONG, chunk):
        batch = driver.batch({0: reference.long_ids[start : start + chunk]}, logits_of_all=True)
        end = start + len(batch.token_ids)
        at = [position for position in range(start, end) if position % every == 0]
        batch.logit_indices = torch.tensor([position - start for position in at], dtype=torch.int64)
        logits = model.forward(batch, driver.kv)
        driver.lengths[0] = end
        of_sampled = (logits.gather(1, sampled[at]) - reference.long_sampled[at]).abs().amax(1)
        of_best = logits.gather(1, reference.long_best_ids[at]) - reference.long_best_logits[at]
        differences[at] = torch.maximum(of_sampled, of_best.abs().amax(1))
    return differences


def test_reference_files_hold_what_they_must() -> None:
    for name, (_, num_prompts) in MODELS.items():
        reference = read_reference(name)
        assert len(reference.prompts) == num_prompts
        assert reference.chosen.shape == (num_prompts, NUM_NEW)
        assert len(reference.long_ids) == NUM_LONG
        ids = reference.long_ids
        windows = {tuple(ids[at : at + 8]) for at in range(NUM_LONG - 8)}
        assert len(windows) == NUM_LONG - 8, "the text repeats itself"
        behind = reference.best_logits[..., 0] - reference.chosen_logits
        assert (behind <= NEAR_TIE).all()
        assert (behind > 0).mean() <= NEAR_TIE_SHARE


def test_greedy_tokens_are_the_references(case: Case) -> None:
    near_ties = check_greedy(case.model, case.reference)
    assert near_ties <= NEAR_TIE_SHARE * case.reference.chosen.size


def test_logits_along_a_long_text(case: Case) -> None:
    differences = long_difference(case.model, case.reference, chunk=256)
    assert differences.max() <= LOGIT_TOLERANCE


@pytest.mark.parametrize("case", ["gemma3"], indirect=True)
@pytest.mark.parametrize("window", [511, 513])
def test_a_window_off_by_one_is_noticed(case: Case, window: int) -> None:
    attentions = [layer.attention for layer in case.model.layers if layer.attention.is_sliding]
    assert {attention.window for attention in attentions} == {512}
    try:
        for attention in attentions:
            attention.window = window
        differences = long_difference(case.model, case.reference, chunk=256, every=25)
    finally:
        for attention in attentions:
            attention.window = 512
    assert differences[:500].max() <= LOGIT_TOLERANCE
    assert differences[520:].max() > 10 * LOGIT_TOLERANCE


def directory_or_variant(name: str) -> Path:
    return smollm2_directory() if name == "directory" else smollm2_variant_gguf(name)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["directory", "F32"])
def test_other_forms_of_the_same_values_give_the_same_logits(form: str) -> None:
    reference = read_reference("smollm2")
    model = load_model(directory_or_variant(form), max_positions=2048)
    assert long_difference(model, reference, chunk=500).max() <= LOGIT_TOLERANCE
    assert check_greedy(model, reference) <= NEAR_TIE_SHARE * reference.chosen.size


@pytest.mark.slow
@pytest.mark.parametrize(("form", "tolerance"), [("F16", 0.2), ("Q8_0", 1.5)])
def test_coarser_forms_stay_near(form: str, tolerance: float) -> None:
    reference = read_reference("smollm2")
    model = load_model(directory_or_variant(form), max_positions=2048)
    differences = long_difference(model, reference, chunk=500)
    print(form, differences.max(), differences.mean())
    assert LOGIT_TOLERANCE < differences.max() <= tolerance
