from __future__ import annotations

import pytest

from ksana.messages.outputs import Finished
from ksana.messages.requests import SamplingParams
from ksana.scheduling.stop_rules import StopRules, suppressed_token_ids


def rules(prompt_len: int = 10, max_model_len: int = 100, **sampling: object) -> StopRules:
    params = SamplingParams(seed=0, **{"max_tokens": 5, **sampling})  # type: ignore[arg-type]
    return StopRules.of(params, (2, 3), prompt_len, max_model_len)


STOP = Finished(reason="stop")
LENGTH = Finished(reason="length")


@pytest.mark.parametrize(
    ("sampling", "token_id", "num_output", "expected"),
    [
        ({}, 9, 1, None),
        ({}, 9, 4, None),
        ({}, 9, 5, LENGTH),
        ({}, 2, 1, STOP),
        ({}, 3, 1, STOP),
        ({}, 2, 5, STOP),
        ({"ignore_eos": True}, 2, 1, None),
        ({"ignore_eos": True}, 2, 5, LENGTH),
        ({"stop_token_ids": (9,)}, 9, 1, Finished(reason="stop", stop_reason=9)),
        ({"stop_token_ids": (2,)}, 2, 1, STOP),
        ({"stop_token_ids": (2,), "ignore_eos": True}, 2, 1, Finished(reason="stop", stop_reason=2)),
        ({"min_tokens": 3}, 2, 2, None),
        ({"min_tokens": 3}, 2, 3, STOP),
        ({"min_tokens": 3, "stop_token_ids": (9,)}, 9, 2, None),
        ({"min_tokens": 5}, 2, 5, STOP),
    ],
)
def test_ending(sampling: dict, token_id: int, num_output: int, expected: Finished | None) -> None:
    assert rules(**sampling).ending(token_id, num_output) == expected


def test_the_context_ends_before_max_tokens() -> None:
    assert rules(prompt_len=97).max_tokens == 3
    assert rules(prompt_len=97).ending(9, 3) == LENGTH
    assert rules(prompt_len=90, max_tokens=None).max_tokens == 10


def test_suppressed_token_ids() -> None:
    def suppressed(**sampling: object) -> tuple[int, ...]:
        return suppressed_token_ids(SamplingParams(seed=0, **sampling), (2, 3))  # type: ignore[arg-type]

    assert suppressed(stop_token_ids=(9,)) == ()
    assert suppressed(min_tokens=1, stop_token_ids=(9, 2)) == (2, 3, 9)
    assert suppressed(min_tokens=1, stop_token_ids=(9,), ignore_eos=True) == (9,)
