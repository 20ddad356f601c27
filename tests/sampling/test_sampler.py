"""Drawing tokens: repeatable, nothing of a row depends on its neighbours, native and plain torch agree."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ksana.kernels import library
from ksana.sampling.sampler import RowSampling, SampleError, sample, sample_row
from tests.sampling.drawing import draw, logits_of, row


@pytest.fixture(params=["native", "reference"])
def _implementation(request, monkeypatch):
    if request.param == "reference":
        monkeypatch.setattr(library, "_choice", library._Choice(None, "a test", 1))


pytestmark = pytest.mark.usefixtures("_implementation")


def test_the_same_request_gives_the_same_tokens():
    logits = logits_of(1000)
    assert torch.equal(draw(logits, 50, seed=5), draw(logits, 50, seed=5))
    assert not torch.equal(draw(logits, 50, seed=5), draw(logits, 50, seed=6))
    assert not torch.equal(draw(logits, 50, seed=5), draw(logits, 50, seed=5, choice=1))


def random_row(rng: random.Random, vocabulary: int, index: int) -> RowSampling:
    return row(
        seed=rng.getrandbits(64),
        position=index,
        choice=rng.randrange(3),
        suppressed=tuple(rng.sample(range(vocabulary), min(2, vocabulary - 1))),
        temperature=rng.choice([0.0, 0.2, 1.0, 1.0, 3.0]),
        top_k=rng.choice([0, 0, 1, 7, 40, vocabulary, vocabulary + 3]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 0.01]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.7]),
    )


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.sampled_from([2, 17, 100, 3000]),
    spread=st.sampled_from([0.0, 0.3, 6.0]),
)
def test_batches_and_both_implementations_agree(seed, vocabulary, spread):
    rng = random.Random(seed)
    logits = torch.stack([logits_of(vocabulary, seed + i, spread) for i in range(6)])
    if seed % 3 == 0:
        logits = logits.round()
    rows = [random_row(rng, vocabulary, i) for i in range(6)]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(6)]
    assert together == [sample_row(logits[i], rows[i]) for i in range(6)]


def test_greedy_takes_the_lowest_of_equal_ids():
    logits = torch.zeros(3, 100)
    logits[0, [70, 31, 99]] = 4.0
    logits[1] = -7.0
    logits[2, 99] = 1e-30
    assert sample(logits, [row(temperature=t) for t in (0.0, 1e-6, 0.0)]) == [31, 0, 99]


def test_very_low_temperature_is_the_best_token():
    logits = logits_of(1000)
    assert set(draw(logits, 20, temperature=2e-5).tolist()) == {int(logits.argmax())}


def test_top_k_of_one_is_greedy():
    logits = logits_of(1000)
    assert set(draw(logits, 20, top_k=1).tolist()) == {int(logits.argmax())}


@pytest.mark.parametrize("params", [{}, {"temperature": 100.0}, {"top_k": 50}, {"min_p": 0.1}])
def test_top_p_of_zero_is_greedy(params):
    logits = logits_of(1000)
    assert set(draw(logits, 20, top_p=0.0, **params).tolist()) == {int(logits.argmax())}
    equal = torch.zeros(1, 100)
    equal[0, [70, 31, 99]] = 4.0
    rows = [row(top_p=0.0, **params)]
    assert sample(equal, rows) == [sample_row(equal[0], rows[0])] == [31]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_suppressed_tokens_are_never_drawn(params):
    logits = logits_of(50)
    best = logits.topk(3).indices.tolist()
    untouched = logits.clone()
    tokens = draw(logits, 200, suppressed=(*best, 50, 10**9, -1), **params)
    assert not set(best) & set(tokens.tolist())
    assert torch.equal(logits, untouched)


def test_a_bad_row_harms_only_itself():
    logits = torch.stack([logits_of(100, i) for i in range(6)])
    rows = [row(seed=i, temperature=i % 2) for i in range(6)]
    good = sample(logits, rows)
    logits[1, 99] = float("nan")
    logits[2, 0] = float("nan")
    logits[3, 50] = float("inf")
    logits[4] = float("-inf")
    result = sample(logits, rows)
    assert [result[0], result[5]] == [good[0], good[5]]
    for index, word in ((1, "NaN"), (2, "NaN"), (3, r"+inf"), (4, "-inf")):
        failed = result[index]
        assert isinstance(failed, SampleError)
        assert word in failed.message


def test_minus_infinity_is_a_token_that_is_never_drawn():
    logits = torch.full((1, 100), float("-inf"))
    logits[0, 42] = -1e30
    for params in ({"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}):
        assert sample(logits, [row(**params)]) == [42]


def test_everything_suppressed_is_an_error():
    (result,) = sample(torch.zeros(1, 3), [row(suppressed=(0, 1, 2))])
    assert isinstance(result, SampleError)


@pytest.mark.parametrize(
    ("logits", "count"),
    [(torch.zeros(2, 5), 1), (torch.zeros(5), 5), (torch.zeros(1, 5).double(), 1), (torch.zeros(1, 0), 1)],
)
def test_wrong_logits_are_refused(logits, count):
    with pytest.raises(ValueError, match="sample"):
        sample(logits, [row()] * count)


def test_rows_of_a_wider_buffer():
    wide = logits_of(300).view(3, 100)
    rows = [row(seed=i) for i in range(3)]
    assert sample(wide[:, :50], rows) == sample(wide[:, :50].contiguous(), rows)


def test_no_rows():
    assert sample(torch.zeros(0, 10), []) == []


def test_large_vocabulary_with_flat_logits():
    """Where nothing is peaked the native search has to look at everything, and stays exact."""
    logits = logits_of(50_000, spread=0.01)
    for params in ({"top_p": 0.97}, {"top_k": 20_000}, {"top_k": 30_000, "top_p": 0.3}, {"min_p": 0.95}):
        params_row = row(seed=3, **params)
        assert sample(logits[None], [params_row]) == [sample_row(logits, params_row)]
