"""What a script gives as prompts and sampling: taken as it was meant, or refused with its place."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from ksana.errors import RequestError
from ksana.messages.requests import ChatMessage, ChatPrompt, SamplingParams, TextPrompt, TokensPrompt
from ksana.script_inputs import as_prompts, as_sampling

CHAT = ChatPrompt(messages=(ChatMessage(role="user", content="hi"),))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("text", [TextPrompt(text="text")]),
        ("", [TextPrompt(text="")]),
        (["a", "b"], [TextPrompt(text="a"), TextPrompt(text="b")]),
        (("a", [1, 2]), [TextPrompt(text="a"), TokensPrompt(token_ids=(1, 2))]),
        ([1, 2], [TokensPrompt(token_ids=(1, 2))]),
        ((-1, 2**70), [TokensPrompt(token_ids=(-1, 2**70))]),
        (range(3), [TokensPrompt(token_ids=(0, 1, 2))]),
        (np.array([1, 2]), [TokensPrompt(token_ids=(1, 2))]),
        (np.array([[1, 2], [3, 4]]), [TokensPrompt(token_ids=(1, 2)), TokensPrompt(token_ids=(3, 4))]),
        ([np.int32(5)], [TokensPrompt(token_ids=(5,))]),
        (TokensPrompt(token_ids=[np.int64(5)]), [TokensPrompt(token_ids=(5,))]),  # type: ignore[arg-type]
        ((text for text in "ab"), [TextPrompt(text="a"), TextPrompt(text="b")]),
        ([[]], [TokensPrompt(token_ids=())]),
        ([], []),
        ([CHAT, TextPrompt(text="x")], [CHAT, TextPrompt(text="x")]),
        (ChatPrompt(messages=[CHAT.messages[0]]), [CHAT]),  # type: ignore[arg-type]
    ],
)
def test_prompts_as_they_are_meant(given: Any, meant: list[Any]) -> None:
    prompts = as_prompts(given)
    assert prompts == meant
    for prompt in prompts:
        if isinstance(prompt, TokensPrompt):
            assert all(type(token_id) is int for token_id in prompt.token_ids)
        elif not isinstance(prompt, TextPrompt):
            msgspec.msgpack.encode(prompt)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "prompts: None will not do"),
        (5, "prompts: 5 will not do"),
        (1.5, "prompts: 1.5 will not do"),
        (True, "prompts: True will not do"),
        (b"abc", "prompts: b'abc' will not do"),
        (bytearray(b"abc"), "will not do"),
        ({"prompt": "x"}, "will not do"),
        ({"a", "b"}, "will not do"),
        (SamplingParams(seed=1), "will not do"),
        (["a", None], "prompt 1: None will not do"),
        (["a", 5], "prompt 1: 5 will not do"),
        (["a", b"b"], "prompt 1: b'b' will not do"),
        ([True, False], "prompt 0: True will not do"),
        ([1, True], "prompt 0: 1 will not do"),
        ([[1, True]], "prompt 0 holds True at place 1, no token id"),
        ([[1.0]], "prompt 0 holds 1.0 at place 0"),
        ([["a"]], "prompt 0 holds 'a' at place 0"),
        (np.array([1.0]), "prompt 0"),
        (np.array([True]), "prompt 0"),
        (TokensPrompt(token_ids=(1, None)), "holds None at place 1"),  # type: ignore[arg-type]
        (TokensPrompt(token_ids="12"), "'12' will not do"),  # type: ignore[arg-type]
        (TextPrompt(text=None), "the prompt is no TextPrompt"),  # type: ignore[arg-type]
        ([TextPrompt(text=b"x")], "prompt 0 is no TextPrompt"),  # type: ignore[arg-type]
        (TextPrompt(text="a", add_special_tokens=1), "is no TextPrompt"),  # type: ignore[arg-type]
        (ChatPrompt(messages=("hi",)), "is no ChatPrompt"),  # type: ignore[arg-type]
        (ChatPrompt(messages=(object(),)), "is no ChatPrompt"),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_what_is_no_prompt(given: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said) as refusal:
        as_prompts(given)
    assert (refusal.value.status, refusal.value.param) == (400, "prompt")
    assert len(refusal.value.message) < 400


def test_sampling_for_all_or_for_each() -> None:
    one, two = SamplingParams(seed=1), SamplingParams(seed=2)
    assert as_sampling(one, 2) == [one, one]
    assert as_sampling((one, two), 2) == [one, two]
    with pytest.raises(ValueError, match="1 prompts, but 2 sampling"):
        as_sampling([one, two], 1)


@pytest.mark.parametrize("given", [None, {}, {"seed": 1}, 5, "x", [None], [{"seed": 1}], CHAT], ids=repr)
def test_what_is_no_sampling(given: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        as_sampling(given, 1)
    assert refusal.value.param == "sampling"
