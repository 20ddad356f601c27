import pytest

from ksana.costs.step_cost import LinearStepCost, StepShape, step_shape
from tests.devices.plans import plan, row


def test_the_shape_of_a_step() -> None:
    shape = step_shape(plan(1, row(1, 0, 6), row(2, 10, 1), row(3, 20, 4), row(4, 7, 1)))
    assert shape == StepShape(
        num_tokens=12,
        num_rows=4,
        num_samples=sum(r.sample for r in (row(1, 0, 6), row(2, 10, 1), row(3, 20, 4), row(4, 7, 1))),
        prefills=((6, 0), (4, 20)),
        num_decodes=2,
        decode_kv=17,
        max_decode_kv=10,
        decode_lengths=(10, 7),
    )
    assert shape.prefill_kv == 6 + 24
    assert shape.prefill_pairs == (1 + 2 + 3 + 4 + 5 + 6) + (21 + 22 + 23 + 24)
    assert shape.num_attended_tokens == 6 + 11 + 24 + 8


def test_a_linear_cost() -> None:
    shape = step_shape(plan(1, row(1, 0, 6), row(2, 10, 1)))
    cost = LinearStepCost(fixed_s=1, per_token_s=0.1, per_attended_token_s=0.01)
    assert cost.seconds(shape) == pytest.approx(1 + 0.7 + 0.17)
