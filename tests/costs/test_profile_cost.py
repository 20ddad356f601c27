from __future__ import annotations

from pathlib import Path

import pytest

from ksana.costs.extrapolation import ExtrapolationError
from ksana.costs.profile_cost import ProfileCost
from ksana.costs.step_cost import StepShape
from ksana.perf.profile_tables import read_profile
from tests.costs.profiles import attention_us, dense_us, write_profile

NUM_LAYERS = 4


def shape(*prefills: tuple[int, int], decodes: int = 0, kv: int = 0) -> StepShape:
    return StepShape(
        num_tokens=sum(tokens for tokens, _ in prefills) + decodes,
        num_rows=len(prefills) + decodes,
        num_samples=len(prefills) + decodes,
        prefills=prefills,
        num_decodes=decodes,
        decode_kv=decodes * kv,
        max_decode_kv=kv,
    )


def other_us(tokens: int, rows: int, rows_measured: int) -> float:
    assert rows <= rows_measured
    return NUM_LAYERS * (dense_us(tokens) + 2 * 2.0) + 5.0 + 50 + rows_measured


@pytest.fixture
def cost(tmp_path: Path) -> ProfileCost:
    write_profile(tmp_path)
    return ProfileCost(read_profile(tmp_path, num_layers=NUM_LAYERS))


def test_at_measured_points_it_is_the_sum_over_layers(cost: ProfileCost) -> None:
    expected = other_us(8, 8, 8) + NUM_LAYERS * attention_us(0, 0, 8, 256)
    assert cost.seconds(shape(decodes=8, kv=256)) == pytest.approx(expected * 1e-6)
    expected = other_us(64, 1, 1) + NUM_LAYERS * attention_us(64, 128, 0, 0)
    assert cost.seconds(shape((64, 128))) == pytest.approx(expected * 1e-6)


def test_between_points_decodes_cost_launch_and_work(cost: ProfileCost) -> None:
    expected = other_us(6, 6, 8) + NUM_LAYERS * attention_us(0, 0, 6, 200)
    assert cost.seconds(shape(decodes=6, kv=200)) == pytest.approx(expected * 1e-6)


def test_a_prefill_costs_its_square(cost: ProfileCost) -> None:
    """The measured chunks are 128 and 256; a straight line between them would be 7 % too much."""
    us = cost._attention.microseconds(shape((192, 0)))
    assert us == pytest.approx(attention_us(192, 0, 0, 0), rel=2e-3)
    assert (attention_us(128, 0, 0, 0) + attention_us(256, 0, 0, 0)) / 2 > us * 1.05
    assert cost._attention.microseconds(shape((200, 300))) == pytest.approx(
        attention_us(200, 300, 0, 0), rel=1e-2
    )


def test_a_prefill_beside_decodes(cost: ProfileCost) -> None:
    alone = cost.seconds(shape((64, 128)))
    both = cost.seconds(shape((64, 128), decodes=4, kv=100))
    attention = NUM_LAYERS * (0.02 * 4 * 100 + 0.5 * 4)
    expected = alone * 1e6 + attention + NUM_LAYERS * (dense_us(96) - dense_us(64)) + (8 - 1)
    assert both * 1e6 == pytest.approx(expected)


def test_more_prefills_add_their_work_but_no_launch(cost: ProfileCost) -> None:
    one = cost._attention.microseconds(shape((128, 128)))
    least = attention_us(16, 0, 0, 0)
    both = cost._attention.microseconds(shape((64, 16), (128, 128)))
    assert both == pytest.approx(one + attention_us(64, 16, 0, 0) - least)


def test_between_sizes_the_next_tile_counts(cost: ProfileCost) -> None:
    assert cost.seconds(shape(decodes=17, kv=64)) - cost.seconds(shape(decodes=16, kv=64)) == pytest.approx(
        1e-6 * (NUM_LAYERS * (20 + 0.02 * 64 + 0.5) + 32 - 16)
    )


def test_graphs_pad_small_steps(tmp_path: Path) -> None:
    write_profile(tmp_path, padded_sizes=(1, 4, 24, 64))
    padded = ProfileCost(read_profile(tmp_path, num_layers=NUM_LAYERS))
    five, eight = (other_us(tokens, 5, 8) for tokens in (24, 8))
    attention = NUM_LAYERS * attention_us(0, 0, 5, 64)
    assert five > eight
    launches = padded.tables.launches
    assert launches.full_us < 0 < launches.none_us
    expected = five + attention + launches.full_us
    assert padded.seconds(shape(decodes=5, kv=64)) == pytest.approx(expected * 1e-6)
    above = padded.seconds(shape((65, 0)))
    expected = other_us(96, 1, 1) + NUM_LAYERS * attention_us(65, 0, 0, 0)
    assert above == pytest.approx((expected + launches.none_us) * 1e-6, rel=2e-3)
    mixed = padded.seconds(shape((16, 0), decodes=5, kv=64))
    expected = other_us(24, 6, 8) + NUM_LAYERS * attention_us(16, 0, 5, 64) + launches.piecewise_us
    assert mixed == pytest.approx(expected * 1e-6)


@pytest.mark.parametrize(
    "outside",
    [shape((257, 0)), shape(decodes=33, kv=64), shape(decodes=4, kv=1025), shape((16, 513))],
    ids=["tokens", "decodes", "KV of decodes", "KV before a prefill"],
)
def test_it_does_not_go_beyond_what_was_measured(cost: ProfileCost, outside: StepShape) -> None:
    with pytest.raises(ExtrapolationError, match="outside of what the cost model was made from"):
        cost.seconds(outside)


def test_unless_it_may_and_then_it_counts(tmp_path: Path) -> None:
    write_profile(tmp_path)
    cost = ProfileCost(read_profile(tmp_path, num_layers=NUM_LAYERS), allow_extrapolation=True)
    expected = other_us(4, 4, 4) + NUM_LAYERS * attention_us(0, 0, 4, 2000)
    assert cost.seconds(shape(decodes=4, kv=2000)) == pytest.approx(expected * 1e-6)
    assert cost.extrapolation.num == 1
    # Beside a prefill, 32 decodes were not measured; the straight from the last two goes on.
    assert cost._attention.microseconds(shape((64, 128), decodes=32, kv=64)) == pytest.approx(
        attention_us(64, 128, 32, 64)
    )
    assert cost.extrapolation.num == 2
    # Outside in all ways at once: more tokens, more rows, more decodes, longer KV. It is one step.
    assert cost.seconds(shape((300, 600), decodes=100, kv=2000)) > 0
    assert cost.extrapolation.num == 3


def test_nothing_takes_less_than_the_least_measured(cost: ProfileCost) -> None:
    assert cost.seconds(shape((2, 0))) == pytest.approx(
        1e-6 * (other_us(8, 1, 1) + NUM_LAYERS * attention_us(16, 0, 0, 0))
    )


def test_newer_tables_count_all_keys_of_a_prefill(tmp_path: Path) -> None:
    """Every chunk has been measured with its own lengths before it."""
    write_profile(tmp_path)
    keys = (16, 48, 64, 100, 128, 256, 500, 768)
    points = [(0, 0, num, kv) for num in (1, 8, 32) for kv in (16, 1024)]
    points += [(chunk, key, 0, 0) for chunk in (16, 64, 128, 256) for key in keys if key >= chunk]
    points += [(*point[:2], num, kv) for point in points[6:] for num in (1, 8) for kv in (16, 1024)]
    lines = [
        f"attention,{chunk},{float(key)},{num},{kv},{q},{q * attention_us(chunk, key - chunk, num, kv)}"
        for chunk, key, num, kv in points
        for q in (1, 2)
    ]
    header = "layer,prefill_chunk,prefill_key,n_decode,kv_decode,decode_q_len,time_us"
    (tmp_path / "attention.csv").write_text("\n".join([header, *lines]))
    cost = ProfileCost(read_profile(tmp_path, num_layers=NUM_LAYERS))
    assert cost.attention_us(shape((128, 300))) == pytest.approx(attention_us(128, 300, 0, 0))
    assert cost.attention_us(shape((64, 300), decodes=4, kv=200)) == pytest.approx(
        attention_us(64, 300, 4, 200)
    )
    assert cost.attention_us(shape(decodes=8, kv=500)) == pytest.approx(attention_us(0, 0, 8, 500))
