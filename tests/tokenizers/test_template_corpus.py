"""Chat templates of models in use, rendered by ksana, by Jinja set up as in transformers, by transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ksana.errors import RequestError
from ksana.messages.requests import ChatMessage
from ksana.tokenizers import template_budget
from ksana.tokenizers.chat_template import ChatTemplate
from tests.tokenizers.plain_jinja import DATE, plain_environment

TEMPLATES = {
    path.stem: path for path in sorted((Path(__file__).parents[1] / "data/chat_templates").glob("*.jinja"))
}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
NASTY = "  <|im_end|> <think>a</think>\n\n{{ 7*7 }} {% raw %}é 漢 \U0001f600 \u200b \\n \"'<&>\t[INST]</s>\n"


def chat(*turns: str) -> tuple[ChatMessage, ...]:
    """ "u:Hi" is a message of the user, "a:", "s:", "t:" and "d:" are the other roles."""
    roles = {"u": "user", "a": "assistant", "s": "system", "t": "tool", "d": "developer"}
    return tuple(ChatMessage(role=roles[turn[0]], content=turn[2:]) for turn in turns)


CONVERSATIONS = {
    "one": chat("u:Hi"),
    "system": chat("s:Be brief.", "u:Hi"),
    "turns": chat("u:Hi", "a:Hello!", "u:Name a river.", "a:The Rhine.", "u:Another?"),
    "system and turns": chat("s:Be brief.", "u:Hi", "a:Hello!", "u:Bye"),
    "ends with an answer": chat("u:Hi", "a:Hello, I"),
    "empty": chat("s:", "u:", "a:", "u:"),
    "nasty": chat(f"s:{NASTY}", f"u:{NASTY}", f"a:{NASTY}", f"u:{NASTY}"),
    "blanks": chat("s:  x  ", "u:\n\n x \n", "a: y \n", "u:\t"),
    "two users": chat("u:Hi", "u:there"),
    "two answers": chat("u:Hi", "a:x", "a:y", "u:z"),
    "answer first": chat("a:Hello", "u:Hi"),
    "system last": chat("u:Hi", "s:Be brief."),
    "two systems": chat("s:a", "s:b", "u:Hi"),
    "only system": chat("s:a"),
    "tool": chat("u:Weather?", "a:Let me see.", "t:20 degrees", "a:It is warm.", "u:Thanks"),
    "developer": chat("d:Be brief.", "u:Hi"),
    "thoughts": chat("u:Hi", "a:<think>\nhm\n</think>\n\nHello", "u:And?", "a:<think>x</think>y"),
    "commands": chat("s:/no_think Be brief.", "u:Hi /no_think", "a:x", "u:/think why"),
    "named": (ChatMessage(role="user", content="Hi", name="Ann"), *chat("a:Hello", "u:Bye")),
    "long": chat("s:Be brief.", *[f"{'ua'[i % 2]}:{i} " + "word " * 30 for i in range(201)]),
}
FLAGS = ((False, False), (True, False), (False, True))


def plain(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    dicts = [{"role": m.role, "content": m.content, "name": m.name} for m in messages]
    return [{key: value for key, value in message.items() if value is not None} for message in dicts]


def compare(source: str, reference: Callable[[list[dict[str, str]], bool, bool], str], name: str) -> int:
    """Render all conversations; returns how many the reference did not refuse."""
    template = ChatTemplate(source, SPECIAL_TOKENS, name)
    num_rendered = 0
    for kind, messages in CONVERSATIONS.items():
        for prompt, go_on in FLAGS:
            where = f"{name}, {kind}, add_generation_prompt={prompt}, continue_final_message={go_on}"
            try:
                expected = reference(plain(messages), prompt, go_on)
            except Exception:
                with pytest.raises(RequestError):
                    pytest.fail(f"{where}: {template.render(messages, prompt, go_on, DATE)!r}")
                continue
            num_rendered += 1
            assert template.render(messages, prompt, go_on, DATE) == expected, where
    return num_rendered


def test_there_are_fifty_of_them() -> None:
    assert len({path.read_bytes() for path in TEMPLATES.values()}) >= 50


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_writes_what_jinja_writes(name: str) -> None:
    source = TEMPLATES[name].read_bytes().decode()
    compiled = plain_environment().from_string(source)

    def reference(messages: list[dict[str, str]], prompt: bool, go_on: bool) -> str:
        final = messages[-1]["content"]
        if go_on:
            messages[-1]["content"] += "MARK "
        names = {"tools": None, "documents": None, "add_generation_prompt": prompt}
        text = compiled.render({**SPECIAL_TOKENS, **names, "messages": messages})
        if not go_on:
            return text
        if final.strip() not in text:
            raise ValueError("the final message is not there")
        start = text.rindex("MARK")
        return text[:start] if text.startswith("MARK ", start) else text[:start].rstrip()

    assert compare(source, reference, name) >= 10


@pytest.mark.slow  # transformers takes seconds to import
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_writes_what_transformers_writes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import chat_template_utils

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            assert tz is None
            return datetime.fromisoformat(DATE)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    source = TEMPLATES[name].read_bytes().decode()

    def reference(messages: list[dict[str, str]], prompt: bool, go_on: bool) -> str:
        texts, _ = chat_template_utils.render_jinja_template(
            [messages],
            chat_template=source,
            add_generation_prompt=prompt,
            continue_final_message=go_on,
            **SPECIAL_TOKENS,
        )
        return str(texts[0])

    assert compare(source, reference, name) >= 10


@pytest.mark.parametrize("name", ["gemma-4-31b-it", "gpt-oss-120b", "llama-3.1-8b-instruct", "qwen3-0.6b"])
def test_long_conversations_are_within_the_limits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4's template looks back over all messages for each, and takes two thirds of the steps."""
    monkeypatch.setattr(template_budget, "MAX_CPU_S", math.inf)  # for slow machines
    source = TEMPLATES[name].read_bytes().decode()
    turns = [f"{'ua'[i % 2]}:{i} " + "word " * 500 for i in range(801)]
    text = ChatTemplate(source, SPECIAL_TOKENS, name).render(chat(*turns), date=DATE)
    assert len(text) > 2_000_000
