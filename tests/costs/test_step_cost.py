import pytest

from ksana.costs.step_cost import LinearStepCost, StepShape, step_shape
from tests.devices.plans import plan, row


def test_costs() -> None:
    shape = step_shape(plan(1, row(1, 0, 6), row(2, 10, 1)))
    assert shape == StepShape(num_rows=2, num_tokens=7, num_attended_tokens=17)
    cost = LinearStepCost(fixed_s=1, per_token_s=0.1, per_attended_token_s=0.01)
    assert cost.seconds(shape) == pytest.approx(1 + 0.7 + 0.17)
