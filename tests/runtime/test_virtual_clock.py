import time

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
