from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from ksana.messages.outputs import Ended, Failed, Finished, OutputEvent, TextDelta, Usage
from ksana.messages.requests import Generate, TextPrompt, TokensPrompt
from ksana.tokenizers.prompts import refusal
from tests.gateway.fake_client import accepted, fails, ids_of, says, too_long
from tests.gateway.serving import COMPLETION, running, sse_data


async def echo(asked: Generate) -> AsyncIterator[OutputEvent]:
    """Says the prompt's first id once per token; the higher the id, the sooner."""
    first = ids_of(asked.prompt)[0]
    yield accepted(asked)
    for index in range(3):
        await trio.sleep((1000 - first) * 0.00002)
        yield TextDelta(request_id=asked.request_id, text=f"<{first}>", token_ids=(index,))
    yield Ended(
        request_id=asked.request_id,
        outcome=Finished(reason="length"),
        usage=Usage(num_prompt_tokens=len(ids_of(asked.prompt)), num_output_tokens=3),
    )


async def test_one_prompt() -> None:
    async with running(says("a", "b", reason="stop")) as gateway:
        answer = (await gateway.post("/v1/completions", COMPLETION)).json()
        assert gateway.client.asked[0].sampling.max_tokens == 16
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [
        {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert answer["usage"]["total_tokens"] == 4


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", [TextPrompt(text="hi")]),
        (["hi", "ho"], [TextPrompt(text="hi"), TextPrompt(text="ho")]),
        ([1, 2], [TokensPrompt(token_ids=(1, 2))]),
        ([[1, 2], [3]], [TokensPrompt(token_ids=(1, 2)), TokensPrompt(token_ids=(3,))]),
    ],
)
async def test_four_forms_of_prompt(prompt: Any, expected: list[Any]) -> None:
    async with running() as gateway:
        answer = await gateway.post("/v1/completions", {"prompt": prompt})
        assert answer.status_code == 200, answer.text
        assert [asked.prompt for asked in gateway.client.asked] == expected
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(len(expected)))


async def test_many_prompts_share_one_answer_in_order() -> None:
    async with running(echo) as gateway:
        answer = (await gateway.post("/v1/completions", {"prompt": [[7], [900], [300]]})).json()
    assert [choice["text"] for choice in answer["choices"]] == ["<7>" * 3, "<900>" * 3, "<300>" * 3]
    assert answer["usage"]["completion_tokens"] == 9
    assert answer["usage"]["prompt_tokens"] == 3


async def test_many_prompts_share_one_stream() -> None:
    body = {"prompt": [[7], [900], [300]], "stream": True, "stream_options": {"include_usage": True}}
    async with running(echo) as gateway:
        *chunks, usage, done = sse_data((await gateway.post("/v1/completions", body)).text)
    assert done == "[DONE]"
    assert usage["usage"]["completion_tokens"] == 9
    texts = ["", "", ""]
    reasons: list[list[str]] = [[], [], []]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"] is not None:
            reasons[choice["index"]].append(choice["finish_reason"])
    assert texts == ["<7>" * 3, "<900>" * 3, "<300>" * 3]
    assert reasons == [["length"]] * 3


async def test_equal_prompts_without_a_seed_have_different_ones() -> None:
    async with running() as gateway:
        await gateway.post("/v1/completions", {"prompt": ["a"] * 5})
        assert len({asked.sampling.seed for asked in gateway.client.asked}) == 5


@pytest.mark.parametrize("seed", [0, 7, -1])
async def test_a_seed_that_is_given_is_every_prompt_s(seed: int) -> None:
    async with running() as gateway:
        await gateway.post("/v1/completions", {"prompt": ["a"] * 5, "seed": seed})
        assert [asked.sampling.seed for asked in gateway.client.asked] == [seed % 2**64] * 5


@pytest.mark.parametrize(("prompt", "max_tokens"), [("a" * 10, 5000), ("a" * 3000, 7), ("a" * 3000, 5000)])
async def test_too_much_for_the_context_says_all_numbers(prompt: str, max_tokens: int) -> None:
    async with running(fails(refusal(too_long(len(prompt), 2048)))) as gateway:
        body = {"prompt": prompt, "max_tokens": max_tokens}
        answer = await gateway.post("/v1/completions", body)
    assert answer.status_code == 400
    error_object = answer.json()["error"]
    assert error_object["code"] == "context_length_exceeded"
    for number in (len(prompt), max_tokens, 2048):
        assert str(number) in error_object["message"]
    assert "(max_tokens)" in error_object["message"]


@pytest.mark.parametrize("streaming", [False, True])
async def test_one_bad_prompt_of_many_is_a_status(streaming: bool) -> None:
    async def script(asked: Generate) -> AsyncIterator[OutputEvent]:
        if ids_of(asked.prompt) == (2,):
            await trio.sleep(0.02)
            failed = Failed(status=400, message="id 2 is bad", param="prompt")
            usage = Usage(num_prompt_tokens=0, num_output_tokens=0)
            yield Ended(request_id=asked.request_id, outcome=failed, usage=usage)
            return
        yield accepted(asked)
        while True:
            yield TextDelta(request_id=asked.request_id, text="x", token_ids=(1,))
            await trio.sleep(0.001)

    async with running(script) as gateway:
        answer = await gateway.post("/v1/completions", {"prompt": [[1], [2], [3]], "stream": streaming})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "id 2 is bad"
        assert len(gateway.client.aborted) == 2
        assert len(gateway.gateway.traffic) == 0


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ([[]], "prompt"),
        ([1, "a"], "prompt"),
        (["a", [1]], "prompt"),
        ([[1, "a"]], "prompt[0][1]"),
        ([1.5], "prompt[0]"),
        ([-1], "prompt[0]"),
        ([2**40], "prompt[0]"),
        ([True], "prompt[0]"),
        (5, "prompt"),
        (None, "prompt"),
        ({"a": 1}, "prompt"),
        (["a"] * 129, "prompt"),
    ],
)
async def test_prompts_that_are_refused(prompt: Any, param: str) -> None:
    async with running() as gateway:
        answer = await gateway.post("/v1/completions", {"prompt": prompt})
        assert gateway.client.asked == []
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


async def test_no_prompt_at_all() -> None:
    async with running() as gateway:
        answer = await gateway.post("/v1/completions", {"model": "fake"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 0}, "logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"messages": []}, "messages"),
    ],
)
async def test_what_is_not_built_is_refused_by_name(more: dict[str, Any], param: str) -> None:
    async with running() as gateway:
        answer = await gateway.post("/v1/completions", {**COMPLETION, **more})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
