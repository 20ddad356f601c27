import logging

import pytest
import trio

from ksana.errors import InvariantViolated
from ksana.runtime.restarts import RestartLimiter
from ksana.runtime.supervisor import supervise
from ksana.runtime.virtual_clock import VirtualClock


def test_restarts_are_counted_in_a_window() -> None:
    limiter = RestartLimiter(2, within_s=60)
    assert [limiter.allow(t) for t in (0, 10, 20, 59, 60.5, 61)] == [True, True, False, False, True, False]
    limiter.forgive()
    assert limiter.allow(61)


def test_generations_follow_each_other_until_they_break_too_often(caplog: pytest.LogCaptureFixture) -> None:
    generations = 0
    crashes: list[str] = []

    async def generation() -> None:
        nonlocal generations
        generations += 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            await trio.sleep(1)
            raise InvariantViolated("pools do not balance")

    async def main() -> bool:
        return await supervise(generation, lambda error: crashes.append(str(error)), RestartLimiter(3, 60))

    with caplog.at_level(logging.CRITICAL):
        assert trio.run(main, clock=VirtualClock()) is False
    assert generations == len(crashes) == 4
    assert "pools do not balance" in caplog.text  # with the traceback
    assert "stops serving" in caplog.text


def test_rare_breaks_are_survived_for_ever_and_a_good_end_ends() -> None:
    generations = 0

    async def generation() -> None:
        nonlocal generations
        generations += 1
        await trio.sleep(100)
        if generations < 20:
            raise InvariantViolated("once in a while")

    async def main() -> bool:
        return await supervise(generation, lambda _error: None, RestartLimiter(3, 60))

    assert trio.run(main, clock=VirtualClock()) is True
    assert generations == 20


def test_cancelling_passes_through() -> None:
    crashes: list[Exception] = []

    async def generation() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)

    async def main() -> None:
        with trio.move_on_after(5) as scope:
            await supervise(generation, crashes.append, RestartLimiter(3, 60))
        assert scope.cancelled_caught

    trio.run(main, clock=VirtualClock())
    assert crashes == []
