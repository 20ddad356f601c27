from __future__ import annotations

import time
from typing import Any

import pytest

from ksana.errors import RequestError
from ksana.messages.encoding import EncodePrompt
from ksana.messages.requests import (
    ChatMessage,
    ChatPrompt,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from ksana.tokenizers.prompts import PromptEncoder
from tests.tokenizers.tiny_tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
ENCODER = PromptEncoder(TOKENIZER, max_model_len=100, vocab_size=TOKENIZER.vocab_size)


def chat(*contents: str, **options: Any) -> ChatPrompt:
    return ChatPrompt(messages=tuple(ChatMessage(role="user", content=text) for text in contents), **options)


def test_all_forms_of_a_prompt() -> None:
    text = ENCODER.encode(TextPrompt(text="abc"))
    assert text == tuple(TOKENIZER.encode("abc"))
    assert ENCODER.encode(TextPrompt(text="abc", add_special_tokens=False)) == text[1:]
    assert ENCODER.encode(TokensPrompt(token_ids=(5, 6))) == (5, 6)
    conversation = chat("Hi", add_generation_prompt=False)
    assert ENCODER.encode(conversation) == tuple(TOKENIZER.chat(conversation.messages, False))


@pytest.mark.parametrize(
    ("prompt", "param", "code", "text"),
    [
        (TokensPrompt(token_ids=()), "prompt", "empty_prompt", "empty"),
        (TextPrompt(text="", add_special_tokens=False), "prompt", "empty_prompt", "empty"),
        (TokensPrompt(token_ids=(5, 10_000)), "prompt", "invalid_token_id", "Token 1 is 10000.*0 to 264"),
        (TokensPrompt(token_ids=(-1,)), "prompt", "invalid_token_id", "Token 0 is -1"),
        (TokensPrompt(token_ids=(5,) * 100), "prompt", "context_length_exceeded", "100 tokens.*context 100"),
        (TextPrompt(text="x" * 100), "prompt", "context_length_exceeded", "101 tokens.*context 100"),
        (TextPrompt(text="x" * 10_000), "prompt", "context_length_exceeded", "10000 characters.*100 tokens"),
        (chat("x" * 200), "messages", "context_length_exceeded", "tokens.*context 100"),
        (chat("x" * 5_000, "x" * 5_000), "messages", "context_length_exceeded", "10008 characters"),
        (chat(), "messages", None, "empty"),
        (TextPrompt(text="a\ud800"), "prompt", None, "surrogate"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_numbers(
    prompt: Prompt, param: str, code: str | None, text: str
) -> None:
    with pytest.raises(RequestError, match=text) as refused:
        ENCODER.encode(prompt)
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, param, code)


def test_a_text_that_cannot_fit_is_not_tokenized() -> None:
    start_s = time.thread_time()
    with pytest.raises(RequestError):
        ENCODER.encode(TextPrompt(text="ab " * 10_000_000))
    assert time.thread_time() - start_s < 1  # tokenizing it takes five seconds


def test_tokens_that_the_model_has_no_embedding_for_are_refused() -> None:
    small = PromptEncoder(TOKENIZER, max_model_len=100, vocab_size=50)
    assert small.encode(TextPrompt(text="!"))
    with pytest.raises(RequestError, match="outside the vocabulary"):
        small.encode(TextPrompt(text="z"))


class TestResolve:
    def test_no_max_tokens_means_up_to_the_context(self) -> None:
        assert ENCODER.resolve(SamplingParams(seed=1), 30).max_tokens == 70

    def test_a_number_that_fits_stays(self) -> None:
        sampling = SamplingParams(seed=1, max_tokens=70)
        assert ENCODER.resolve(sampling, 30) is sampling

    def test_a_number_that_does_not_fit_is_refused_with_both_numbers(self) -> None:
        with pytest.raises(RequestError, match=r"100 tokens.*101 were asked for: 30 in the prompt and 71"):
            ENCODER.resolve(SamplingParams(seed=1, max_tokens=71), 30)

    def test_min_tokens_must_fit_too(self) -> None:
        with pytest.raises(RequestError, match="min_tokens is 71"):
            ENCODER.resolve(SamplingParams(seed=1, min_tokens=71), 30)


def test_an_internal_error_harms_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[int]:
        raise RuntimeError("secret")

    monkeypatch.setattr(TOKENIZER, "encode", fail)
    answer = ENCODER.answer(EncodePrompt(request_id=7, prompt=TextPrompt(text="a")))
    assert answer.request_id == 7
    assert answer.error is not None
    assert answer.error.status == 500
    assert "secret" not in answer.error.message
