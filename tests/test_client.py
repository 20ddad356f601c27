import gc

import pytest
import trio

from ksana.client import SlotStream
from ksana.messages.base import Message
from ksana.messages.outputs import Ended, Finished, OutputEvent, TextDelta, Usage
from ksana.messages.requests import Abort
from ksana.runtime.slots import Slots


def delta(text: str, *token_ids: int) -> TextDelta:
    return TextDelta(request_id=1, text=text, token_ids=token_ids)


ENDED = Ended(
    request_id=1,
    outcome=Finished(reason="stop"),
    usage=Usage(num_prompt_tokens=1, num_output_tokens=2),
)


class Opened:
    """A stream, and what it says to the tokenizer."""

    def __init__(self) -> None:
        self.slots = Slots(1)
        self.said: list[Message] = []
        self.stream: SlotStream | None = SlotStream(self.slots, self.slots.open(), self.said.append)


async def test_events_one_by_one_and_all_at_once() -> None:
    opened = Opened()
    assert opened.stream is not None
    for event in (delta("a", 1), ENDED):
        opened.slots.post(event)
    assert await opened.stream.__anext__() == delta("a", 1)
    assert await opened.stream.take() == [ENDED]
    assert await opened.stream.take() == []
    with pytest.raises(StopAsyncIteration):
        await opened.stream.__anext__()
    assert opened.said == []
    assert len(opened.slots) == 0


async def test_closing_before_the_end_aborts_once() -> None:
    opened = Opened()
    assert opened.stream is not None
    opened.stream.close()
    opened.stream.close()
    assert opened.said == [Abort(request_id=1)]
    assert await opened.stream.take() == []
    assert len(opened.slots) == 1  # until the scheduler has ended it
    opened.slots.post(ENDED)
    assert len(opened.slots) == 0


async def test_closing_after_the_end_came_but_before_it_was_read_aborts_nothing() -> None:
    opened = Opened()
    assert opened.stream is not None
    opened.slots.post(ENDED)
    opened.stream.close()
    assert opened.said == []
    assert len(opened.slots) == 0


async def test_cancelled_while_waiting() -> None:
    opened = Opened()
    assert opened.stream is not None
    with trio.move_on_after(0.01):
        await opened.stream.take()
    assert opened.said == [Abort(request_id=1)]


async def test_dropped() -> None:
    opened = Opened()
    opened.stream = None
    gc.collect()
    assert opened.said == [Abort(request_id=1)]


async def test_dropped_on_another_thread_closes_on_the_right_one() -> None:
    opened = Opened()

    def drop() -> None:
        opened.stream = None
        gc.collect()

    await trio.to_thread.run_sync(drop)
    await trio.testing.wait_all_tasks_blocked()
    assert opened.said == [Abort(request_id=1)]


def test_dropped_after_the_engine_is_gone() -> None:
    async def main() -> Opened:
        return Opened()

    opened = trio.run(main)
    opened.stream = None
    gc.collect()
    assert opened.said == []


async def test_a_block_left_by_an_exception() -> None:
    opened = Opened()
    got: list[OutputEvent] = []
    assert opened.stream is not None
    opened.slots.post(delta("a", 1))
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with opened.stream as stream:
            got.append(await stream.__anext__())
            raise ZeroDivisionError
    assert got == [delta("a", 1)]
    assert opened.said == [Abort(request_id=1)]
