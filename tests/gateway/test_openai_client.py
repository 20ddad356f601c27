"""The `openai` package as a client, in a thread, against a server on a socket."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import openai
import pytest
import trio

from ksana.messages.outputs import Failed
from tests.gateway.fake_client import endless, fails, says
from tests.gateway.serving import Running, eventually, running

T = TypeVar("T")


async def with_openai(gateway: Running, use: Callable[[openai.OpenAI], T], key: str = "none") -> T:
    """Run `use` in a thread with a client of `gateway`."""

    def work() -> T:
        url = f"http://127.0.0.1:{gateway.port}/v1"
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=10) as client:
            return use(client)

    return await trio.to_thread.run_sync(work)


MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


async def test_chat() -> None:
    async with running(says("Hé", "llo", reason="stop")) as gateway:
        answer = await with_openai(
            gateway, lambda client: client.chat.completions.create(model="fake", messages=MESSAGES, seed=1)
        )
        assert answer.choices[0].message.content == "Héllo"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2


async def test_chat_stream_with_usage() -> None:
    def use(client: openai.OpenAI) -> tuple[str, list[str | None], int]:
        text, reasons, num_tokens = "", [], 0
        with client.chat.completions.create(
            model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        ) as stream:
            for chunk in stream:
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    reasons.append(choice.finish_reason)
                if chunk.usage:
                    num_tokens = chunk.usage.completion_tokens
        return text, [reason for reason in reasons if reason], num_tokens

    async with running(says("H", "é", "😀", pause_s=0.01)) as gateway:
        assert await with_openai(gateway, use) == ("Hé😀", ["length"], 3)


async def test_completions_of_several_prompts() -> None:
    async with running(says("x")) as gateway:
        answer = await with_openai(
            gateway, lambda client: client.completions.create(model="fake", prompt=["a", "b"], max_tokens=3)
        )
        assert [choice.index for choice in answer.choices] == [0, 1]


async def test_errors_are_the_client_s_own_kinds() -> None:
    async with running(api_key="secret") as gateway:
        ask = lambda client: client.chat.completions.create(model="fake", messages=MESSAGES)  # noqa: E731
        with pytest.raises(openai.AuthenticationError):
            await with_openai(gateway, ask, "wrong")
        await with_openai(gateway, ask, "secret")
        with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here"):
            await with_openai(
                gateway,
                lambda client: client.chat.completions.create(model="gpt-4", messages=MESSAGES),
                "secret",
            )
        with pytest.raises(openai.BadRequestError) as refused:
            await with_openai(
                gateway,
                lambda client: client.chat.completions.create(model="fake", messages=MESSAGES, n=3),
                "secret",
            )
        assert refused.value.param == "n"
        gateway.client.script = fails(Failed(status=429, message="later", retry_after_s=1))
        with pytest.raises(openai.RateLimitError):
            await with_openai(gateway, ask, "secret")


async def test_a_stream_that_fails_half_way_raises() -> None:
    def use(client: openai.OpenAI) -> None:
        for chunk in client.chat.completions.create(model="fake", messages=MESSAGES, stream=True):
            assert chunk.choices[0].finish_reason is None

    async with running(fails(Failed(status=500, message="worker lost"), "par")) as gateway:
        with pytest.raises(openai.APIError, match="worker lost"):
            await with_openai(gateway, use)


async def test_leaving_a_stream_early() -> None:
    def use(client: openai.OpenAI) -> None:
        with client.chat.completions.create(model="fake", messages=MESSAGES, stream=True) as stream:
            for number, _ in enumerate(stream):
                if number == 3:
                    break

    async with running(endless()) as gateway:
        await with_openai(gateway, use)
        await eventually(lambda: gateway.client.aborted == [1], 1)


async def test_models() -> None:
    async with running() as gateway:
        models = await with_openai(gateway, lambda client: list(client.models.list()))
        assert [model.id for model in models] == ["fake"]
        assert (await with_openai(gateway, lambda client: client.models.retrieve("fake"))).id == "fake"
