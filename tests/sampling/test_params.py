from __future__ import annotations

import math

import pytest

from ksana.errors import RequestError
from ksana.messages.requests import SamplingParams
from ksana.sampling.params import validate

VOCAB_SIZE = 1000
MAX_MODEL_LEN = 2048


def check(**fields: object) -> None:
    validate(SamplingParams(**{"seed": 0, **fields}), VOCAB_SIZE, MAX_MODEL_LEN)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"seed": 2**64 - 1},
        {"temperature": 0},
        {"temperature": 0.0},
        {"temperature": 1e-5},
        {"temperature": 1e-9},
        {"top_p": 0},
        {"top_p": 0.0},
        {"temperature": 100},
        {"top_k": 0},
        {"top_k": VOCAB_SIZE},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"max_tokens": 1, "min_tokens": 1},
        {"max_tokens": MAX_MODEL_LEN},
        {"max_tokens": None, "min_tokens": 7},
        {"stop": ("x" * 1000,) * 16},
        {"stop_token_ids": tuple(range(256))},
        {"stop_token_ids": (VOCAB_SIZE - 1,)},
        {"ignore_eos": True, "skip_special_tokens": False, "include_stop_str_in_output": True},
    ],
)
def test_accepted(fields: dict) -> None:
    check(**fields)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.5),
        ("seed", True),
        ("seed", None),
        ("seed", 10**4_000),
        ("temperature", -0.1),
        ("temperature", 100.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", VOCAB_SIZE + 1),
        ("top_k", 5.0),
        ("top_p", -0.1),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", MAX_MODEL_LEN + 1),
        ("max_tokens", 2.0),
        ("min_tokens", -1),
        ("min_tokens", MAX_MODEL_LEN + 1),
        ("stop", "abc"),
        ("stop", None),
        ("stop", ("",)),
        ("stop", ("x" * 1001,)),
        ("stop", ("x",) * 17),
        ("stop", (b"x",)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (VOCAB_SIZE,)),
        ("stop_token_ids", (True,)),
        ("stop_token_ids", (1,) * 257),
        ("stop_token_ids", 5),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", "yes"),
        ("skip_special_tokens", None),
    ],
)
def test_refused_with_the_field_named(param: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        check(**{param: value})
    assert caught.value.param == param
    assert caught.value.status == 400
    assert param in caught.value.message or param == "stop"
    assert len(caught.value.message) < 200


def test_an_integer_too_long_to_be_printed_is_refused_too() -> None:
    with pytest.raises(RequestError, match="more than 128 bits"):
        check(seed=1 << 100_000)


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(RequestError, match=r"min_tokens \(5\) must not be above max_tokens \(4\)") as caught:
        check(min_tokens=5, max_tokens=4)
    assert caught.value.param == "min_tokens"


def test_every_field_is_checked() -> None:
    """A field that is added must be honoured or refused, so this list must grow with the struct."""
    assert set(SamplingParams.__struct_fields__) == {
        "seed",
        "max_tokens",
        "min_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "include_stop_str_in_output",
        "skip_special_tokens",
    }
