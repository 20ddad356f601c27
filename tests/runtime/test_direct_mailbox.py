from collections.abc import Sequence

import pytest
import trio

from ksana.errors import InvariantViolated
from ksana.messages.base import Message
from ksana.messages.requests import Abort
from ksana.runtime.actor import Said, run_actor
from ksana.runtime.direct_mailbox import DirectMailbox
from ksana.runtime.mailbox import Mailbox


def abort(request_id: int) -> Abort:
    return Abort(request_id=request_id)


class Doubler:
    """Says two messages for each it hears up to 3, the first to `first`, then one to `second`."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.is_inside = False

    def handle(self, now_s: float, messages: Sequence[Message]) -> list[Said]:  # noqa: ARG002
        assert not self.is_inside
        self.is_inside = True
        said: list[Said] = []
        for message in messages:
            assert isinstance(message, Abort)
            number = message.request_id
            self.heard.append(number)
            if number == 99:
                raise ZeroDivisionError
            if number < 4:
                said += [("swa_cache_manager", abort(10 * number)), ("scheduler", abort(10 * number + 1))]
        self.is_inside = False
        return said

    def next_timer_s(self) -> float | None:
        return None


class Echo:
    def handle(self, now_s: float, messages: Sequence[Message]) -> list[Said]:  # noqa: ARG002
        return [("block_allocator", message) for message in messages]

    def next_timer_s(self) -> float | None:
        return None


async def test_messages_are_handled_where_they_are_put_in_the_order_of_their_senders() -> None:
    first, second = DirectMailbox[Message]("first", 8), DirectMailbox[Message]("second", 8)
    told: list[int] = []
    doubler = Doubler()

    def tell(message: Message) -> None:
        assert isinstance(message, Abort)
        told.append(message.request_id)

    async with trio.open_nursery() as nursery:
        first.put(abort(1))  # before anybody attends
        post = {"swa_cache_manager": second.put, "scheduler": tell}
        nursery.start_soon(run_actor, "block_allocator", doubler, first, post)
        nursery.start_soon(run_actor, "swa_cache_manager", Echo(), second, {"block_allocator": first.put})
        await trio.testing.wait_all_tasks_blocked()
        assert told == [11]
        assert doubler.heard == [1, 10]
        first.put(abort(2))
        # What 2 led to was said before the echo of its first consequence was heard.
        assert told == [11, 21]
        assert doubler.heard == [1, 10, 2, 20]
        with pytest.raises(ZeroDivisionError):
            first.put(abort(99))
        nursery.cancel_scope.cancel()
    first.put(abort(3))
    assert len(first) == 1  # nobody attends any more


async def test_it_is_bounded_like_any_mailbox() -> None:
    mailbox = DirectMailbox[Message]("m", 1)
    mailbox.put(abort(1))
    with pytest.raises(InvariantViolated, match="full"):
        mailbox.put(abort(2))


async def test_an_actor_with_a_timer_is_refused() -> None:
    class WithTimer(Echo):
        def next_timer_s(self) -> float | None:
            return 1.0

    mailbox = DirectMailbox[Message]("m", 1)
    mailbox.put(abort(1))
    with pytest.raises(InvariantViolated, match="timer"):
        await run_actor("block_allocator", WithTimer(), mailbox, {"block_allocator": print})


async def test_an_ordinary_mailbox_wakes_the_task() -> None:
    mailbox: Mailbox[Message] = Mailbox("m", 8)
    doubler = Doubler()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_actor, "block_allocator", doubler, mailbox, {})
        mailbox.put(abort(7))
        assert doubler.heard == []
        await trio.testing.wait_all_tasks_blocked()
        assert doubler.heard == [7]
        nursery.cancel_scope.cancel()
