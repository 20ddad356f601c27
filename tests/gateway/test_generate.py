from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from ksana.messages.outputs import Failed
from ksana.messages.requests import TextPrompt, TokensPrompt
from ksana.tokenizers.prompts import refusal
from tests.gateway.fake_client import fails, says, too_long
from tests.gateway.serving import running


def records(body: bytes) -> list[Any]:
    assert body.endswith(b"\0")
    return [msgspec.json.decode(record) for record in body[:-1].split(b"\0")]


async def test_streams_cumulative_records_by_default() -> None:
    async with running(says("a", "b\0", "c", pause_s=0.01)) as gateway:
        answer = await gateway.post("/generate", {"prompt": "Hi"})
        assert gateway.client.asked[0].prompt == TextPrompt(text="Hi")
    assert answer.status_code == 200
    told = records(answer.content)
    assert told[-1] == {
        "texts": ["ab\0c"],
        "output_token_ids": [[0, 1, 2]],
        "logprobs": [],
        "input_token_ids": [72, 105],
    }
    for before, after in itertools.pairwise(told):
        assert after["texts"][0].startswith(before["texts"][0])
        assert len(after["output_token_ids"][0]) > len(before["output_token_ids"][0])


async def test_one_object_when_not_streaming() -> None:
    async with running(says("a", "b")) as gateway:
        answer = await gateway.post("/generate", {"input_tokens": [1, 2], "stream": False})
        assert gateway.client.asked[0].prompt == TokensPrompt(token_ids=(1, 2))
    assert answer.json() == {
        "texts": ["ab"],
        "output_token_ids": [[0, 1]],
        "logprobs": [],
        "input_token_ids": [1, 2],
    }


async def test_no_output_is_one_empty_record() -> None:
    async with running(says(reason="stop")) as gateway:
        answer = await gateway.post("/generate", {"prompt": "Hi"})
    assert [one["texts"] for one in records(answer.content)] == [[""]]


async def test_greedy_unless_asked_otherwise() -> None:
    configs = [
        {},
        {"temperature": 0.0, "topk": 1, "topp": 0.0, "logprobs": 0},
        {"topk": 0, "do_sample": False},
        {"temperature": 0, "topk": 50, "topp": 0.9},
        {"temperature": 0, "topp": 0.0},
        {"temperature": 0.7, "topk": 1},
        {"topp": 1.0},
        {"topp": 0.0, "min_p": 0.0},
        {"do_sample": False, "temperature": 0.7},
        {"max_new_tokens": -1, "seed": 4, "top_k": None, "temperature": None},
    ]
    async with running() as gateway:
        for config in configs:
            answer = await gateway.post("/generate", {"prompt": "Hi", "sampling_config": config})
            assert answer.status_code == 200, answer.text
        for asked in gateway.client.asked:
            assert asked.sampling.temperature == 0.0
            assert asked.sampling.top_k == 0
            assert asked.sampling.top_p == 1.0
            assert asked.sampling.max_tokens is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"temperature": 0.7}, (0.7, 0, 1.0, 0.0)),
        ({"topp": 0.9}, (1.0, 0, 0.9, 0.0)),
        ({"top_p": 0.9}, (1.0, 0, 0.9, 0.0)),
        ({"min_p": 0.1}, (1.0, 0, 1.0, 0.1)),
        ({"temperature": 0.7, "topp": 0.9, "min_p": 0.1}, (0.7, 0, 0.9, 0.1)),
        ({"do_sample": True}, (1.0, 0, 1.0, 0.0)),
        ({"topk": 0}, (1.0, 0, 1.0, 0.0)),
        ({"topk": -1}, (1.0, 0, 1.0, 0.0)),
        ({"topk": 50}, (1.0, 50, 1.0, 0.0)),
    ],
)
async def test_any_field_that_asks_for_sampling_gets_it(
    config: dict[str, Any], expected: tuple[float, ...]
) -> None:
    async with running() as gateway:
        answer = await gateway.post("/generate", {"prompt": "Hi", "sampling_config": config})
        assert answer.status_code == 200, answer.text
        sampling = gateway.client.asked[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == expected


async def test_an_answer_can_be_asked_for_again() -> None:
    async with running() as gateway:
        for config in ({}, {}, {"seed": 5}, {"random_seed": 5}):
            await gateway.post("/generate", {"prompt": "Hi", "sampling_config": config})
        seeds = [asked.sampling.seed for asked in gateway.client.asked]
    assert seeds[0] != seeds[1]
    assert seeds[2:] == [5, 5]


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"topk": 5000}, "topk"),
        ({"top_k": 5000}, "top_k"),
        ({"topk": 5000, "temperature": 0}, "topk"),
        ({"top_k": "x"}, "top_k"),
        ({"top_p": 2}, "top_p"),
        ({"temperature": 0.7, "topp": 0}, "topp"),
        ({"temperature": 0.7, "top_p": 0}, "top_p"),
        ({"temperature": 1000}, "temperature"),
        ({"temperature": 1000, "topk": 1}, "temperature"),
        ({"temperature": -1e-9, "topk": 1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_new_tokens": 5000}, "max_new_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"min_new_tokens": 5000}, "min_new_tokens"),
        ({"max_new_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"stop_token_ids": [5000]}, "stop_token_ids"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ""}, "stop"),
        ({"random_seed": 1.5}, "random_seed"),
    ],
)
async def test_a_field_is_called_what_the_client_calls_it(config: dict[str, Any], name: str) -> None:
    async with running() as gateway:
        answer = await gateway.post("/generate", {"prompt": "Hi", "sampling_config": config})
        assert gateway.client.asked == []
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == f"sampling_config.{name}"
    assert f"sampling_config.{name}" in error["message"]
    for other in ("topk", "top_k", "topp", "top_p", "max_tokens", "max_new_tokens", "stop_strings", "seed"):
        if other not in config:
            assert f"{other} " not in error["message"].replace(f"sampling_config.{name}", "")


@pytest.mark.parametrize(
    ("body", "param"), [({"prompt": "a" * 3000}, "prompt"), ({"input_tokens": [1] * 3000}, "input_tokens")]
)
async def test_a_prompt_too_long_is_the_field_that_was_sent(body: dict[str, Any], param: str) -> None:
    async with running(fails(refusal(too_long(3000, 2048)))) as gateway:
        for streaming in (False, True):
            config = {"max_new_tokens": 7}
            answer = await gateway.post("/generate", {**body, "stream": streaming, "sampling_config": config})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param)
            assert "3000 tokens" in error["message"]
            assert "2048" in error["message"]
            assert "7 tokens of output were asked for (sampling_config.max_new_tokens)" in error["message"]


@pytest.mark.parametrize(
    "config",
    [
        {
            "topk": 50,
            "topp": 0.9,
            "temperature": 0.7,
            "max_new_tokens": 9,
            "seed": 3,
            "stop_strings": ["END"],
            "stop_token_ids": [2],
            "ignore_eos": True,
            "num_beams": 1,
            "repetition_penalty": 1.0,
        },
        {
            "top_k": 50,
            "top_p": 0.9,
            "temperature": 0.7,
            "max_tokens": 9,
            "seed": 3,
            "stop": "END",
            "stop_token_ids": [2],
            "ignore_eos": True,
        },
    ],
)
async def test_sampling_config_and_its_aliases(config: dict[str, Any]) -> None:
    async with running() as gateway:
        answer = await gateway.post("/generate", {"prompt": "Hi", "sampling_config": config})
        assert answer.status_code == 200, answer.text
        sampling = gateway.client.asked[0].sampling
    assert (sampling.top_k, sampling.top_p, sampling.temperature) == (50, 0.9, 0.7)
    assert (sampling.max_tokens, sampling.seed, sampling.stop) == (9, 3, ("END",))
    assert sampling.stop_token_ids == (2,)
    assert sampling.ignore_eos


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "input_tokens": [1]}, "prompt"),
        ({"input_tokens": []}, "input_tokens"),
        ({"input_tokens": ["a"]}, "input_tokens[0]"),
        ({"prompt": "a", "sampling_config": {"num_beams": 4}}, "sampling_config.num_beams"),
        ({"prompt": "a", "sampling_config": {"topk": "x"}}, "sampling_config.topk"),
        ({"prompt": "a", "sampling_config": {"topk": 3, "top_k": 3}}, "sampling_config.top_k"),
        ({"prompt": "a", "sampling_config": {"topk": 3, "topp": 0}}, "sampling_config.topp"),
        ({"prompt": "a", "sampling_config": {"max_new_tokens": 0}}, "sampling_config.max_new_tokens"),
        ({"prompt": "a", "sampling_config": {"tok": 3}}, "sampling_config.tok"),
        ({"prompt": "a", "sampling_config": 3}, "sampling_config"),
        ({"prompt": "a", "what": 3}, "what"),
        ({"prompt": "a", "messages": [{}]}, "messages"),
    ],
)
async def test_what_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    async with running() as gateway:
        answer = await gateway.post("/generate", body)
        assert gateway.client.asked == []
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


async def test_failures_before_and_after_the_first_record() -> None:
    async with running(fails(Failed(status=500, message="lost"))) as gateway:
        assert (await gateway.post("/generate", {"prompt": "a"})).status_code == 500
        gateway.client.script = fails(Failed(status=500, message="lost"), "par")
        answer = await gateway.post("/generate", {"prompt": "a"})
    assert answer.status_code == 200
    *told, error = records(answer.content)
    assert told[-1]["texts"] == ["par"]
    assert error["error"]["message"] == "lost"
