"""Prompts that are made when they are needed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulations.requests import (
    FIRST_TOKEN,
    MAX_CONTENT_ID,
    SPELLING_BASE,
    ListedText,
    NamedText,
    PromptSource,
    SimRequest,
    spelled,
)

CONTENT_IDS = st.integers(0, MAX_CONTENT_ID)


@given(one=CONTENT_IDS, other=CONTENT_IDS, num_tokens=st.integers(4, 600))
def test_equal_numbers_are_equal_text_and_others_soon_differ(one: int, other: int, num_tokens: int) -> None:
    first, second = spelled(NamedText(one, num_tokens)), spelled(NamedText(other, num_tokens))
    assert len(first) == num_tokens
    assert (first[:4] == second[:4]) == (one == other)
    assert all(FIRST_TOKEN <= token_id < FIRST_TOKEN + SPELLING_BASE for token_id in first)


@given(content_id=CONTENT_IDS, short=st.integers(0, 50), more=st.integers(0, 50))
def test_a_partial_text_is_the_beginning_of_the_whole(content_id: int, short: int, more: int) -> None:
    whole = spelled(NamedText(content_id, short + more))
    assert spelled(NamedText(content_id, short)) == whole[:short]


def test_parts_stand_one_after_the_other() -> None:
    prompt = PromptSource((NamedText(1, 5),)).then(ListedText((7, 8)), NamedText(0, 3))
    assert prompt.token_ids() == (4, 3, 3, 3, 4, 7, 8, 3, 3, 3)
    assert prompt.num_tokens == 10


def test_an_id_that_four_tokens_cannot_tell_apart_is_refused() -> None:
    with pytest.raises(ValueError, match="content ids"):
        spelled(NamedText(MAX_CONTENT_ID + 1, 4))


def test_requests_are_json() -> None:
    prompt = PromptSource((NamedText(3, 4), ListedText((1, 2))))
    request = SimRequest(arrival_s=1.5, prompt=prompt, max_tokens=3, leaves_after=0)
    assert msgspec.json.decode(msgspec.json.encode(request), type=SimRequest) == request
