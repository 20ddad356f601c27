from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from ksana.messages.outputs import Failed
from ksana.messages.requests import TextPrompt, TokensPrompt
from tests.gateway.fake_client import fails, says
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
    ]
    async with running() as gateway:
        for config in configs:
            answer = await gateway.post("/generate", {"prompt": "Hi", "sampling_config": config})
            assert answer.status_code == 200, answer.text
        for asked in gateway.client.asked:
            assert asked.sampling.temperature == 0.0
            assert asked.sampling.top_p == 1.0
            assert asked.sampling.max_tokens is None


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
