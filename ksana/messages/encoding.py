"""Turning long prompts into ids: the tokenizer's core asks its shell, which may use a thread.

Both messages stay inside the tokenizer actor. They are messages so that the core never waits and a journal
of the actor replays without the thread.
"""

from __future__ import annotations

from ksana.messages.base import Message, RequestId
from ksana.messages.outputs import Failed
from ksana.messages.requests import Prompt


class EncodePrompt(Message):
    """tokenizer -> itself, by way of its encoder. Answered by one PromptEncoded, sooner or later."""

    request_id: RequestId
    prompt: Prompt


class PromptEncoded(Message):
    """The answer: ids, or why there are none."""

    request_id: RequestId
    token_ids: tuple[int, ...] = ()
    error: Failed | None = None
