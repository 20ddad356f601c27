import pytest
import trio

from ksana.errors import InvariantViolated
from ksana.runtime.mailbox import Mailbox


async def test_drains_everything_in_order() -> None:
    mailbox: Mailbox[int] = Mailbox("m", 10)
    for number in range(5):
        mailbox.put(number)
    assert await mailbox.drain() == [0, 1, 2, 3, 4]
    assert len(mailbox) == 0


async def test_drain_waits_for_a_message(autojump_clock: trio.testing.MockClock) -> None:
    began_s = autojump_clock.current_time()
    mailbox: Mailbox[str] = Mailbox("m", 1)
    async with trio.open_nursery() as nursery:

        async def later() -> None:
            await trio.sleep(3)
            mailbox.put("hello")

        nursery.start_soon(later)
        assert await mailbox.drain() == ["hello"]
    assert trio.current_time() - began_s == pytest.approx(3, abs=0.1)


async def test_full_is_a_bug_and_names_the_message() -> None:
    mailbox: Mailbox[int] = Mailbox("box of x", 2)
    mailbox.put(1)
    mailbox.put(2)
    with pytest.raises(InvariantViolated, match=r"'box of x' is full \(2\): int"):
        mailbox.put(3)
    assert await mailbox.drain() == [1, 2]


async def test_close_lets_the_rest_be_read_then_ends() -> None:
    mailbox: Mailbox[int] = Mailbox("m", 2)
    mailbox.put(1)
    mailbox.close()
    mailbox.put(2)
    assert await mailbox.drain() == [1]
    with pytest.raises(trio.EndOfChannel):
        await mailbox.drain()


async def test_close_wakes_the_receiver() -> None:
    mailbox: Mailbox[int] = Mailbox("m", 2)
    with trio.fail_after(1):
        async with trio.open_nursery() as nursery:

            async def receive() -> None:
                with pytest.raises(trio.EndOfChannel):
                    await mailbox.drain()

            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            mailbox.close()


async def test_a_cancelled_drain_loses_nothing() -> None:
    mailbox: Mailbox[int] = Mailbox("m", 2)
    with trio.move_on_after(0):
        await mailbox.drain()
    mailbox.put(7)
    assert await mailbox.drain() == [7]


async def test_clear_forgets() -> None:
    mailbox: Mailbox[int] = Mailbox("m", 1)
    mailbox.put(1)
    mailbox.clear()
    mailbox.put(2)
    assert await mailbox.drain() == [2]


def test_capacity_must_be_positive() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Mailbox("m", 0)


async def test_a_second_receiver_is_a_bug() -> None:
    mailbox: Mailbox[int] = Mailbox("m", 1)
    with trio.fail_after(1):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mailbox.drain)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(InvariantViolated, match="two receivers"):
                await mailbox.drain()
            nursery.cancel_scope.cancel()
