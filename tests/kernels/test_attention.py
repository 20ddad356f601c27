"""Paged attention: right against plain torch, and the same bits whatever surrounds a token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ksana.kernels import reference
from tests.kernels.problems import make_problem

TOLERANCE = 3e-6

SHAPES = [
    {"rows": [(1, 1)]},
    {"rows": [(100, 1), (17, 17), (700, 5)], "heads": 9, "kv_heads": 3, "dim": 64},
    {"rows": [(600, 1), (530, 33)], "heads": 4, "kv_heads": 1, "dim": 256, "window": 512},
    {"rows": [(70, 70)], "heads": 8, "kv_heads": 8, "dim": 40, "block_size": 8, "window": 17},
    {"rows": [(1100, 1)], "dim": 32, "block_size": 24},
    {"rows": [(1500, 40)], "heads": 6, "dim": 72, "block_size": 128, "window": 513},
    {"rows": [(66, 66)], "heads": 2, "kv_heads": 1, "dim": 8, "window": 1},
    {"rows": [(300, 2)], "heads": 71, "kv_heads": 1, "dim": 64},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_close_to_the_reference(problem, shape):
    case = problem(**shape)
    torch.testing.assert_close(case.run(), case.run(reference.paged_attention), atol=TOLERANCE, rtol=0)


def test_reference_is_softmax_attention(problem):
    """The reference itself, against torch's dense attention with an explicit mask."""
    case = problem([(150, 150)], dim=64, window=40)
    block_size = case.k_cache.shape[2]
    blocks = case.block_tables[0, : -(-150 // block_size)].long()
    keys, values = (c[blocks].transpose(0, 1).flatten(1, 2)[:, :150] for c in (case.k_cache, case.v_cache))
    i, j = torch.arange(150)[:, None], torch.arange(150)[None, :]
    mask = (j <= i) & (i - j < 40)
    dense = F.scaled_dot_product_attention(
        *(case.q.transpose(0, 1)[None], keys[None], values[None]), attn_mask=mask, enable_gqa=True
    )
    ours = case.run(reference.paged_attention)
    torch.testing.assert_close(ours, dense[0].transpose(0, 1), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_bits_do_not_depend_on_batch_or_chunk(problem, shape):
    case = problem(**shape)
    whole = case.run()
    starts = case.query_starts.tolist()
    for row in range(len(starts) - 1):
        num_tokens = starts[row + 1] - starts[row]
        for size in {1, 3, 16, num_tokens}:
            for start in range(0, num_tokens, size):
                stop = min(start + size, num_tokens)
                alone = case.part(row, start, stop).run()
                assert torch.equal(alone, whole[starts[row] + start : starts[row] + stop])


@pytest.mark.parametrize("block_size", [8, 16, 24, 64, 128])
def test_bits_do_not_depend_on_the_block_size(problem, block_size):
    case = problem([(700, 9), (40, 40)], heads=6, dim=64, window=130)
    assert torch.equal(case.with_block_size(block_size).run(), case.run())


@pytest.mark.parametrize("window", [None, 600])
def test_bits_do_not_depend_on_threads(problem, with_threads, window):
    """With several threads and few tasks the sections of a long context run in parallel, else in turn."""
    case = problem([(2100, 2), (1300, 1)], heads=3, kv_heads=1, dim=64, window=window)
    results = []
    for num_threads in (1, 2, 5):
        with_threads(num_threads)
        results.append(case.run())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_positions_that_are_not_consecutive(problem):
    """A row's tokens may be at any positions; blocks that none of them sees are not read."""
    case = problem([(400, 400)], window=20)
    whole = case.run()
    chosen = torch.tensor([5, 399, 398, 30, 31, 32, 5])
    case.q, case.positions = case.q[chosen], case.positions[chosen]
    case.query_starts = torch.tensor([0, 7], dtype=torch.int32)
    case.block_tables[0, 10:20] = -1
    assert torch.equal(case.run(), whole[chosen])


def test_queries_may_be_a_slice_of_qkv_rows(problem):
    case = problem([(90, 30)])
    expected = case.run()
    qkv = torch.randn(30, 8, 32)
    qkv[:, :4] = case.q
    case.q = qkv[:, :4]
    assert torch.equal(case.run(), expected)


def test_one_window_more_or_less_differs(problem):
    case = problem([(600, 1)], window=512)
    exact = case.run()
    for other in (511, 510):
        case.window = other
        assert not torch.allclose(case.run(), exact, atol=TOLERANCE, rtol=0)


def test_extreme_scores(problem):
    case = problem([(200, 3)], dim=64)
    case.q *= 1000.0
    ours = case.run()
    assert torch.isfinite(ours).all()
    torch.testing.assert_close(ours, case.run(reference.paged_attention), atol=2e-3, rtol=0)


def test_nan_stays_in_its_row(problem):
    case = problem([(50, 2), (70, 2)])
    expected = case.run()
    case.q[1] = float("nan")
    result = case.run()
    assert result[1].isnan().all()
    assert torch.equal(result[[0, 2, 3]], expected[[0, 2, 3]])


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_shapes(data):
    kv_heads = data.draw(st.integers(1, 3))
    case = make_problem(
        [
            (length, data.draw(st.integers(1, min(length, 20))))
            for length in data.draw(st.lists(st.integers(1, 160), min_size=1, max_size=4))
        ],
        heads=kv_heads * data.draw(st.integers(1, 8)),
        kv_heads=kv_heads,
        dim=8 * data.draw(st.integers(1, 17)),
        block_size=data.draw(st.integers(1, 40)),
        window=data.draw(st.none() | st.integers(1, 100)),
        seed=data.draw(st.integers(0, 1000)),
    )
    ours = case.run()
    torch.testing.assert_close(ours, case.run(reference.paged_attention), atol=TOLERANCE, rtol=0)
    last = len(case.query_starts) - 2
    num_tokens = int(case.query_starts[-1] - case.query_starts[-2])
    assert torch.equal(case.part(last, num_tokens - 1, num_tokens).run(), ours[-1:])


@pytest.fixture(params=["native", "reference"])
def implementation(request):
    if request.param == "reference":
        request.getfixturevalue("reference_only")


@pytest.mark.usefixtures("implementation")
class TestRefusals:
    """Nothing out of range is ever read: ValueError instead."""

    @pytest.mark.parametrize("entry", [-1, 1000, -(2**31), 2**31 - 1])
    def test_block_out_of_range(self, problem, entry):
        case = problem([(40, 1), (70, 1)])
        case.block_tables[1, 2] = entry
        with pytest.raises(ValueError, match="block"):
            case.run()

    @pytest.mark.parametrize("position", [-1, 96, 2**40, 2**63 - 1, -(2**63)])
    def test_position_beyond_the_table(self, problem, position):
        case = problem([(80, 1)])
        case.positions[0] = position
        with pytest.raises(ValueError, match="position"):
            case.run()

    @pytest.mark.parametrize("starts", [[0, 1, 2], [0, 4, 3], [1, 2, 3], [0, -1, 3], [0, 3, 2**31 - 1]])
    def test_query_starts_that_do_not_fit(self, problem, starts):
        case = problem([(40, 1), (70, 2)])
        case.query_starts = torch.tensor(starts, dtype=torch.int32)
        with pytest.raises(ValueError, match="query_starts"):
            case.run()

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("q", lambda t: t.double()),
            ("q", lambda t: t[:, :3]),
            ("q", lambda t: t[:, :, :24]),
            ("q", lambda t: t.transpose(0, 1)),
            ("k_cache", lambda t: t[:-1]),
            ("k_cache", lambda t: t.transpose(1, 2)),
            ("v_cache", lambda t: t.half()),
            ("block_tables", lambda t: t.long()),
            ("block_tables", lambda t: t[:1]),
            ("block_tables", lambda t: t[:, ::2]),
            ("query_starts", lambda t: t.long()),
            ("positions", lambda t: t.int()),
            ("positions", lambda t: t[:-1]),
        ],
    )
    def test_wrong_shape_or_type(self, problem, name, change):
        case = problem([(40, 1), (70, 2)])
        setattr(case, name, change(getattr(case, name)))
        with pytest.raises(ValueError, match="paged_attention"):
            case.run()

    def test_window_must_be_positive(self, problem):
        case = problem([(40, 1)])
        case.window = 0
        with pytest.raises(ValueError, match="window"):
            case.run()


def test_no_tokens_at_all(problem):
    case = problem([(40, 1)])
    case.q, case.positions = case.q[:0], case.positions[:0]
    case.query_starts = torch.tensor([0, 0], dtype=torch.int32)
    assert case.run().shape == (0, 4, 32)
