"""The `openai` package against a real server: what people will point at it first."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.models_for_tests import smollm2_gguf
from tests.server.conftest import KEY, Serve
from tests.server.process import ServerProcess

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Name three rivers."}]
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


def streamed(client: openai.OpenAI, model: str, **more: Any) -> tuple[str, list[str], list[Any]]:
    """Text, finish reasons and usages of a streamed chat."""
    text, reasons, usages = "", [], []
    with client.chat.completions.create(model=model, messages=MESSAGES, stream=True, **more) as chunks:
        for chunk in chunks:
            assert chunk.model == model
            assert chunk.object == "chat.completion.chunk"
            for choice in chunk.choices:
                assert choice.index == 0
                text += choice.delta.content or ""
                reasons += [choice.finish_reason] if choice.finish_reason else []
            if chunk.usage is not None:
                assert chunk.choices == []
                usages.append(chunk.usage)
    return text, reasons, usages


def test_chat_streamed_and_not(server: ServerProcess) -> None:
    with server.openai() as client:
        whole = client.chat.completions.create(model=server.model, messages=MESSAGES, max_tokens=40, **GREEDY)
        (choice,) = whole.choices
        assert choice.message.role == "assistant"
        assert choice.finish_reason == "length"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 40
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + 40
        options: dict[str, Any] = {"max_tokens": 40, **GREEDY}
        text, reasons, usages = streamed(
            client, server.model, stream_options={"include_usage": True}, **options
        )
        assert text == choice.message.content != ""
        assert reasons == ["length"]
        (usage,) = usages
        assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 40)
        assert streamed(client, server.model, **options) == (text, ["length"], [])


def test_a_seed_repeats_and_another_differs(server: ServerProcess) -> None:
    with server.openai() as client:

        def text(seed: int | None) -> str:
            answer = client.completions.create(
                model=server.model,
                prompt="Once",
                max_tokens=60,
                seed=seed,
                temperature=1,
                extra_body={"ignore_eos": True},
            )
            return answer.choices[0].text

        assert text(5) == text(5) != text(6)
        assert text(None) != text(None)


def test_stop_strings(server: ServerProcess) -> None:
    with server.openai() as client:
        ask: dict[str, Any] = {"model": server.model, "prompt": "a b c", "max_tokens": 80, **GREEDY}
        text = client.completions.create(**ask).choices[0].text
        stop = next(text[at : at + 3] for at in range(20, 60) if text[at : at + 3].isprintable())
        cut = text[: text.index(stop)]
        (whole,) = client.completions.create(stop=[stop], **ask).choices
        assert (whole.text, whole.finish_reason) == (cut, "stop")
        pieces = [chunk.choices[0] for chunk in client.completions.create(stop=stop, stream=True, **ask)]
        assert "".join(piece.text for piece in pieces) == cut
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["stop"]


def test_completions_of_every_form_of_prompt(server: ServerProcess) -> None:
    with server.openai() as client, server.http() as http:

        def ids(text: str) -> list[int]:
            tokens: list[int] = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
            return tokens

        def texts(prompt: Any) -> list[str]:
            answer = client.completions.create(model=server.model, prompt=prompt, max_tokens=12, **GREEDY)
            assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 12 * len(answer.choices)
            return [choice.text for choice in answer.choices]

        (one,), (two,) = texts("Hello there"), texts("Good night")
        assert one != two
        assert texts(["Hello there", "Good night"]) == [one, two]
        assert texts(ids("Hello there")) == [one]
        assert texts([ids("Good night"), ids("Hello there")]) == [two, one]


def test_completions_default_to_16_tokens_and_stream(server: ServerProcess) -> None:
    with server.openai() as client:
        ask: dict[str, Any] = {"model": server.model, "prompt": ["x", "yy"], **GREEDY}
        whole = client.completions.create(**ask)
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 32
        texts, reasons, usage = ["", ""], {}, None
        options: Any = {"include_usage": True}
        for chunk in client.completions.create(stream=True, stream_options=options, **ask):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                if choice.finish_reason:
                    assert choice.index not in reasons
                    reasons[choice.index] = choice.finish_reason
        assert texts == [choice.text for choice in whole.choices]
        assert reasons == {0: "length", 1: "length"}
        assert usage is not None
        assert usage.completion_tokens == 32


def test_models(server: ServerProcess) -> None:
    with server.openai() as client:
        assert [model.id for model in client.models.list()] == [server.model]
        assert client.models.retrieve(server.model).id == server.model


def test_errors_name_what_is_wrong(server: ServerProcess) -> None:
    with server.openai() as client:
        for stream in (False, True):

            def ask(stream: bool = stream, **changes: Any) -> Any:
                body: dict[str, Any] = {"model": server.model, "messages": MESSAGES, "stream": stream}
                return client.chat.completions.create(**(body | changes))

            with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here"):
                ask(model="gpt-4")
            for changes, param in (
                ({"n": 3}, "n"),
                ({"temperature": -1}, "temperature"),
                ({"top_p": -1}, "top_p"),
                ({"extra_body": {"tempratur": 1}}, "tempratur"),
                ({"logprobs": True}, "logprobs"),
                ({"max_tokens": 0}, "max_tokens"),
                ({"extra_body": {"stop_token_ids": [9999]}}, "stop_token_ids"),
                ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
                ({"messages": []}, "messages"),
            ):
                with pytest.raises(openai.BadRequestError) as refused:
                    ask(**changes)
                assert refused.value.param == param, (changes, refused.value.message)
            with pytest.raises(openai.BadRequestError) as refused:
                ask(messages=[{"role": "user", "content": "zq" * 3000}])
            assert refused.value.code == "context_length_exceeded"
            assert "2048" in refused.value.message
            # Both numbers: what was asked for, and what there is.
            with pytest.raises(openai.BadRequestError, match=r"2040\b.*2048|2048.*2040") as refused:
                ask(max_tokens=2040)
            assert refused.value.param == "max_tokens"


def test_api_keys(strict: ServerProcess) -> None:
    for key in ("wrong", "none"):
        with strict.openai(key) as client, pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model=strict.model, messages=MESSAGES)
    with strict.openai(KEY) as client:
        client.chat.completions.create(model=strict.model, messages=MESSAGES, max_tokens=2)


@pytest.mark.slow
def test_the_demo_model(serve: Serve) -> None:
    flags = ("--kv-cache-memory", "256MiB", "--max-model-len", "2048")
    server = serve(*flags, "--served-model-name", "smol", model=str(smollm2_gguf()))
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 120}
    with server.openai() as client, server.http() as http:
        whole = client.chat.completions.create(model="smol", messages=MESSAGES, **options)
        (choice,) = whole.choices
        assert "River" in (choice.message.content or "")
        text, reasons, (usage,) = streamed(client, "smol", stream_options={"include_usage": True}, **options)
        assert (text, reasons) == (choice.message.content, [choice.finish_reason])
        assert whole.usage is not None
        assert usage.completion_tokens == whole.usage.completion_tokens
        ids = http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
        assert usage.prompt_tokens == whole.usage.prompt_tokens == len(ids)
        # The chat template by hand is the same prompt.
        prompt = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        answer = client.completions.create(model="smol", prompt=ids, **options)
        assert answer.choices[0].text == choice.message.content
        assert MESSAGES[0]["content"] in prompt
