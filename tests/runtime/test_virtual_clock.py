import time

import pytest
import trio

from ksana.runtime.virtual_clock import VirtualClock


def test_time_jumps_to_the_next_deadline() -> None:
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await trio.sleep(seconds)
        woken.append((name, trio.current_time()))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sleeper, "b", 3600)
            nursery.start_soon(sleeper, "a", 0.5)
            nursery.start_soon(sleeper, "c", 3600 * 24)

    began = time.perf_counter()
    trio.run(main, clock=VirtualClock())
    assert woken == [("a", 0.5), ("b", 3600.0), ("c", 86400.0)]
    assert time.perf_counter() - began < 2


def test_computing_takes_no_time_and_timeouts_come_when_due() -> None:
    async def main() -> None:
        time.sleep(0.02)  # noqa: ASYNC251 - real time must not matter
        assert trio.current_time() == 10
        with trio.move_on_after(5) as scope:
            await trio.sleep_forever()
        assert scope.cancelled_caught
        assert trio.current_time() == 15

    trio.run(main, clock=VirtualClock(start_s=10))


def test_runnable_tasks_go_before_time() -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:

            async def busy() -> None:
                for _ in range(1000):
                    await trio.lowlevel.checkpoint()
                assert trio.current_time() == 0

            nursery.start_soon(busy)
            await trio.sleep(1)

    trio.run(main, clock=VirtualClock())


def test_calls_come_in_order_when_no_task_can_run() -> None:
    happened: list[tuple[str, float]] = []

    async def main() -> None:
        clock = VirtualClock.current()

        def note(name: str) -> None:
            happened.append((name, trio.current_time()))

        def note_and_go_on() -> None:
            note("second")
            clock.call_at(clock.current_time() + 1, lambda: note("fourth"))

        clock.call_at(2, note_and_go_on)
        clock.call_at(2, lambda: note("third"))
        clock.call_at(1, lambda: note("first"))
        await trio.lowlevel.checkpoint()
        note("task")
        await trio.sleep(2.5)
        note("task")
        clock.call_at(0, lambda: note("late"))
        await trio.sleep(1)

    trio.run(main, clock=VirtualClock())
    assert happened == [
        ("task", 0),
        ("first", 1),
        ("second", 2),
        ("third", 2),
        ("task", 2.5),
        ("late", 2.5),
        ("fourth", 3),
    ]


def test_a_call_can_wake_a_task() -> None:
    async def main() -> None:
        woken = trio.Event()
        VirtualClock.current().call_at(7, woken.set)
        with trio.fail_after(8):
            await woken.wait()
        assert trio.current_time() == 7

    trio.run(main, clock=VirtualClock())


async def test_another_clock_is_told_apart() -> None:
    with pytest.raises(RuntimeError, match="not a virtual one"):
        VirtualClock.current()
