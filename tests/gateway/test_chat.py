from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest

from ksana.messages.outputs import Failed
from ksana.messages.requests import ChatMessage, ChatPrompt
from ksana.tokenizers.prompts import refusal
from tests.gateway.fake_client import fails, says, too_long
from tests.gateway.serving import CHAT, Running, running, sse_data


async def test_whole_answer() -> None:
    async with running(says("Hel", "lo", reason="stop", stop_reason="###")) as gateway:
        answer = (await gateway.post("/v1/chat/completions", CHAT)).json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "fake"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": "###",
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


async def stream(gateway: Running, **more: Any) -> list[Any]:
    answer = await gateway.post("/v1/chat/completions", {**CHAT, "stream": True, **more})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    return sse_data(answer.text)


async def test_stream_has_a_role_first_one_finish_reason_and_one_done() -> None:
    async with running(
        says("Hel", "lö ", '"\n'),
    ) as gateway:
        *chunks, done = await stream(gateway)
    assert done == "[DONE]"
    assert chunks.count("[DONE]") == 0
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == 'Hellö "\n'
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)


async def test_text_with_unicode_line_breaks_stays_on_its_line() -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x1cf\r\ng"
    async with running(says(text)) as gateway:
        answer = await gateway.post("/v1/chat/completions", {**CHAT, "stream": True})
    assert all(line.startswith("data: ") for line in answer.text.splitlines() if line)
    assert sse_data(answer.text)[1]["choices"][0]["delta"]["content"] == text


async def test_usage_is_one_last_chunk_without_choices() -> None:
    async with running(says("a", "b")) as gateway:
        *chunks, usage, done = await stream(gateway, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)


async def test_an_answer_of_no_text_is_still_an_answer() -> None:
    async with running(says(reason="stop")) as gateway:
        *chunks, done = await stream(gateway)
        whole = (await gateway.post("/v1/chat/completions", CHAT)).json()
    assert done == "[DONE]"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop"]
    assert whole["choices"][0]["message"]["content"] == ""


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("failed", "status"),
    [
        (Failed(status=400, message="too long", param="messages", code="context_length_exceeded"), 400),
        (Failed(status=500, message="bad step"), 500),
        (Failed(status=504, message="deadline"), 504),
        (Failed(status=429, message="later", retry_after_s=7, error_type="rate_limit_error"), 429),
    ],
)
async def test_a_failure_before_the_first_output_is_a_status(
    failed: Failed, status: int, streaming: bool
) -> None:
    async with running(fails(failed, accept=True)) as gateway:
        answer = await gateway.post("/v1/chat/completions", {**CHAT, "stream": streaming})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["message"] == failed.message
    assert error["param"] == failed.param
    assert error["code"] == failed.code
    assert error["type"] == ("invalid_request_error" if status == 400 else failed.error_type)
    assert answer.headers.get("retry-after") == ("7" if status == 429 else None)


async def test_a_stream_that_fails_half_way_never_looks_complete() -> None:
    async with running(fails(Failed(status=500, message="worker lost"), "par", "tial")) as gateway:
        *chunks, error = await stream(gateway, stream_options={"include_usage": True})
    assert error["error"]["message"] == "worker lost"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "partial"


async def test_a_failure_half_way_is_a_status_when_not_streaming() -> None:
    async with running(fails(Failed(status=500, message="worker lost"), "partial")) as gateway:
        answer = await gateway.post("/v1/chat/completions", CHAT)
    assert answer.status_code == 500
    assert "partial" not in answer.text


async def test_messages_become_the_engine_s_prompt() -> None:
    messages = [
        {"role": "developer", "content": "Be kind."},
        {
            "role": "user",
            "name": "ann",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [], "refusal": None},
        {"role": "user", "content": "c"},
    ]
    async with running() as gateway:
        answer = await gateway.post("/v1/chat/completions", {**CHAT, "messages": messages})
        assert answer.status_code == 200, answer.text
        prompt = gateway.client.asked[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.date is not None
    age = datetime.now().astimezone() - datetime.fromisoformat(prompt.date)
    assert timedelta(0) <= age < timedelta(minutes=5)
    assert msgspec.structs.replace(prompt, date=None) == ChatPrompt(
        messages=(
            ChatMessage(role="system", content="Be kind."),
            ChatMessage(role="user", content="a\nb", name="ann"),
            ChatMessage(role="assistant", content=""),
            ChatMessage(role="user", content="c"),
        )
    )


async def test_sampling_defaults_and_a_drawn_seed() -> None:
    async with running() as gateway:
        for _ in range(2):
            await gateway.post("/v1/chat/completions", CHAT)
        first, second = (asked.sampling for asked in gateway.client.asked)
    assert (first.temperature, first.top_p, first.top_k, first.max_tokens) == (1.0, 1.0, 0, None)
    assert first.seed != second.seed
    assert 0 <= first.seed < 2**64


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0},
        {"temperature": 2},
        {"temperature": 1e-7},
        {"top_p": 0},
        {"top_p": 0.0},
        {"top_p": 1},
        {"presence_penalty": 0, "frequency_penalty": 0.0},
        {"presence_penalty": None, "frequency_penalty": None},
        {"n": 1},
        {"n": None},
        {"logprobs": False, "top_logprobs": 0},
        {"logprobs": None, "top_logprobs": None},
        {"max_tokens": None, "max_completion_tokens": None},
        {"max_tokens": 5, "max_completion_tokens": 5},
        {"stop": None},
        {"stop": ""},
        {"stop": []},
        {"stop": ["a", "b", "c", "d"]},
        {"seed": None},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"stream": None, "stream_options": None},
        {"stream": True, "stream_options": {}},
        {"stream": True, "stream_options": {"include_usage": False, "include_obfuscation": False}},
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"tools": [], "tool_choice": "none"},
        {"tools": None, "tool_choice": None, "parallel_tool_calls": None},
        {"tool_choice": "auto", "parallel_tool_calls": True},
        {"functions": [], "function_call": "none"},
        {"logit_bias": {}},
        {"logit_bias": None},
        {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "metadata": {"a": "b"}},
        {"user": None, "safety_identifier": None, "prompt_cache_key": None, "metadata": None},
        {"prompt_cache_retention": "in-memory"},
        {"prompt_cache_retention": None},
        {"store": False},
        {"store": None},
        {"service_tier": "auto"},
        {"service_tier": "default"},
        {"service_tier": "flex"},
        {"prompt_cache_retention": "24h"},
        {"service_tier": None},
        {"reasoning_effort": "medium"},
        {"reasoning_effort": None},
        {"verbosity": "medium"},
        {"verbosity": None},
        {"modalities": ["text"]},
        {"modalities": None, "audio": None, "prediction": None, "web_search_options": None},
    ],
)
async def test_what_openai_s_schema_allows_and_changes_nothing_is_no_error(more: dict[str, Any]) -> None:
    async with running() as gateway:
        answer = await gateway.post("/v1/chat/completions", {**CHAT, **more})
        assert answer.status_code == 200, answer.text
        (asked,) = gateway.client.asked
    assert asked.sampling.stop in ((), ("a", "b", "c", "d"))


async def test_sampling_fields_reach_the_engine() -> None:
    body = {
        **CHAT,
        "max_completion_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": -1,
        "stop": "END",
        "stop_token_ids": [5],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    async with running() as gateway:
        answer = await gateway.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        sampling = gateway.client.asked[0].sampling
    assert sampling.max_tokens == 7
    assert sampling.min_tokens == 2
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert sampling.seed == 2**64 - 1
    assert (sampling.stop, sampling.stop_token_ids) == (("END",), (5,))
    assert sampling.ignore_eos
    assert sampling.include_stop_str_in_output
    assert not sampling.skip_special_tokens


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": 5}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "mood": 1}]}]},
            "messages[0].content[0].mood",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["x"] * 1000}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [5000]}, "stop_token_ids"),
        ({"n": 2}, "n"),
        ({"n": 5_000_000}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 10**9}, "top_logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"store": True}, "store"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"what": 1}}, "stream_options.what"),
        ({"stream": "yes"}, "stream"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"cache_salt": "x" * 1000}, "cache_salt"),
        ({"best_ever": 1}, "best_ever"),
        ({"model": 5}, "model"),
    ],
)
async def test_what_is_wrong_is_named(more: dict[str, Any], param: str) -> None:
    async with running() as gateway:
        answer = await gateway.post("/v1/chat/completions", {**CHAT, **more})
        assert gateway.client.asked == []
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.split(".")[-1].split("[")[0] in error["message"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "file", "file": {"file_id": "f"}},
        {"type": "video_url", "video_url": {"url": "x"}},
    ],
    ids=lambda part: part["type"],
)
async def test_what_is_not_text_is_unsupported_content(part: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]
    async with running() as gateway:
        for path in ("/v1/chat/completions", "/tokenize"):
            answer = await gateway.post(path, {"messages": messages})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["code"] == "unsupported_content"
            assert error["param"] == "messages[0].content[1].type"
            assert "unsupported content" in error["message"]
            assert part["type"] in error["message"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_conversation_too_long_is_told_in_the_words_of_chat(name: str) -> None:
    async with running(fails(refusal(too_long(3000, 2048)))) as gateway:
        answer = await gateway.post("/v1/chat/completions", {**CHAT, name: 7})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "messages")
        assert f"7 tokens of output were asked for ({name})" in error["message"]
        answer = await gateway.post("/v1/chat/completions", {**CHAT, name: 5000})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, name)
        assert f"2 in the prompt and 5000 of output ({name})" in error["message"]
        answer = await gateway.post("/v1/chat/completions", {**CHAT, name: 5, "min_tokens": 6})
        assert f"{name} (5)" in answer.json()["error"]["message"]


async def test_neutral_values_and_labels_are_accepted() -> None:
    neutral = {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "repetition_penalty": 1.0,
        "logprobs": False,
        "top_logprobs": None,
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "logit_bias": {},
        "user": "u-1",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "stop": None,
        "seed": None,
        "max_tokens": None,
        "stream_options": None,
    }
    async with running() as gateway:
        answer = await gateway.post("/v1/chat/completions", {**CHAT, **neutral})
    assert answer.status_code == 200, answer.text


async def test_a_near_miss_is_guessed() -> None:
    async with running() as gateway:
        answer = await gateway.post("/v1/chat/completions", {**CHAT, "max_token": 5})
    assert "max_tokens" in answer.json()["error"]["message"]


async def test_an_unknown_model_is_a_404() -> None:
    async with running() as gateway:
        answer = await gateway.post("/v1/chat/completions", {**CHAT, "model": "gpt-4"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert answer.json()["error"]["param"] == "model"
