"""Links take turns or share, and slow mailboxes keep the order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio

from ksana.messages.base import Message
from ksana.messages.requests import Abort
from ksana.runtime.deterministic import run_deterministic
from ksana.runtime.virtual_clock import VirtualClock
from simulations.agenda import Agenda
from simulations.network import Link, LinkSpec, SlowMailbox, SlowMailboxes


def in_virtual_time(main: Callable[[Agenda], None], for_s: float = 100.0) -> None:
    """Run `main`, then let time pass."""

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            agenda = Agenda()
            nursery.start_soon(agenda.run)
            main(agenda)
            await trio.sleep(for_s)
            nursery.cancel_scope.cancel()

    run_deterministic(0, run, VirtualClock())


def arrivals(spec: LinkSpec, sent: list[tuple[float, int]]) -> list[float]:
    """When transfers sent at these times, of so many bytes, arrive; in the order of sending."""
    came = [0.0] * len(sent)

    def main(agenda: Agenda) -> None:
        link = Link(spec, agenda)
        for index, (at_s, num_bytes) in enumerate(sent):

            def arrived(index: int = index) -> None:
                came[index] = trio.current_time()

            def send(num_bytes: int = num_bytes, arrived: Callable[[], None] = arrived) -> None:
                link.send(num_bytes, arrived)

            agenda.at(at_s, send)

    in_virtual_time(main)
    return came


def test_a_link_without_limits_takes_no_time() -> None:
    assert arrivals(LinkSpec(), [(1.0, 100), (2.0, 10**9)]) == [1.0, 2.0]


def test_latency_alone() -> None:
    assert arrivals(LinkSpec(latency_s=0.5), [(1.0, 10), (1.0, 10)]) == [1.5, 1.5]


def test_transfers_in_turn_wait_for_each_other() -> None:
    spec = LinkSpec(latency_s=0.5, bytes_per_s=10.0)
    assert arrivals(spec, [(1.0, 10), (1.0, 20), (9.0, 10)]) == pytest.approx([2.5, 4.5, 10.5])


def test_shared_transfers_slow_each_other_down() -> None:
    spec = LinkSpec(latency_s=0.5, bytes_per_s=10.0, sharing="shared")
    # Alone for a second, then both get half: 10 bytes are left of the first, which takes 2 s.
    assert arrivals(spec, [(1.0, 20), (2.0, 30)]) == pytest.approx([4.5, 6.5])


def test_equal_shared_transfers_arrive_together() -> None:
    spec = LinkSpec(bytes_per_s=10.0, sharing="shared")
    assert arrivals(spec, [(1.0, 10)] * 4) == pytest.approx([5.0] * 4)


def test_a_slow_mailbox_keeps_the_order_when_it_becomes_fast_again() -> None:
    seen: list[tuple[float, int]] = []

    def main(agenda: Agenda) -> None:
        mailbox = SlowMailbox("some", 10, agenda)

        def put(number: int, delay_s: float) -> Callable[[], None]:
            def do() -> None:
                mailbox.delay_s = delay_s
                mailbox.put(Abort(request_id=number))

            return do

        agenda.at(1.0, put(1, 0.5))
        agenda.at(1.2, put(2, 0.1))
        agenda.at(1.3, put(3, 0.0))
        agenda.at(2.0, put(4, 0.0))
        for time_s in (1.4, 1.6, 2.1):
            agenda.at(time_s, lambda: seen.append((trio.current_time(), len(mailbox))))
        agenda.at(3.0, lambda: seen.extend((0.0, number) for number in ids(mailbox)))

    in_virtual_time(main)
    assert seen == [(1.4, 0), (1.6, 3), (2.1, 4), (0.0, 1), (0.0, 2), (0.0, 3), (0.0, 4)]


def ids(mailbox: SlowMailbox) -> list[int]:
    messages: list[Message] = list(mailbox._messages)
    return [message.request_id for message in messages if isinstance(message, Abort)]


def test_mailboxes_of_an_engine_can_be_slowed_one_by_one() -> None:
    def main(agenda: Agenda) -> None:
        mailboxes = SlowMailboxes(num_slots=4, num_loads=2, agenda=agenda)
        mailboxes.slow["block_allocator"].delay_s = 1.0
        mailboxes.block_allocator.put(Abort(request_id=1))
        mailboxes.scheduler.put(Abort(request_id=2))
        assert len(mailboxes.scheduler) == 1
        assert (len(mailboxes.block_allocator), mailboxes.num_on_the_way()) == (0, 1)
        assert not mailboxes.allocators_are_quiet()

    in_virtual_time(main)


def test_what_a_callback_raises_comes_out() -> None:
    def main(agenda: Agenda) -> None:
        agenda.at(1.0, lambda: 1 // 0)

    with pytest.RaisesGroup(ZeroDivisionError):
        in_virtual_time(main)
