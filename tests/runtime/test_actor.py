from collections.abc import Sequence

import pytest
import trio

from ksana.errors import InvariantViolated
from ksana.messages.base import Message
from ksana.messages.requests import Abort
from ksana.messages.steps import WorkerReady
from ksana.runtime.actor import Address, Recorder, Said, Taps, run_actor
from ksana.runtime.mailbox import Mailbox
from ksana.runtime.virtual_clock import VirtualClock


class Echo:
    """Says what it hears, and one thing more when its timer fires."""

    def __init__(self, timer_s: float | None = None) -> None:
        self.timer_s = timer_s
        self.activations: list[tuple[float, int]] = []

    def handle(self, now_s: float, messages: Sequence[Message]) -> list[Said]:
        self.activations.append((now_s, len(messages)))
        if self.timer_s is not None and now_s >= self.timer_s:
            self.timer_s = None
            return [("executor", WorkerReady(pool_epoch=9))]
        return [("scheduler", message) for message in messages]

    def next_timer_s(self) -> float | None:
        return self.timer_s


def test_messages_waiting_together_are_one_activation_and_the_timer_is_another() -> None:
    core = Echo(timer_s=5)
    heard: list[tuple[str, Message]] = []
    taps: list[tuple[Address, float, int, int]] = []

    async def main() -> None:
        mailbox: Mailbox[Message] = Mailbox("m", 8)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                run_actor,
                "tokenizer",
                core,
                mailbox,
                {
                    "scheduler": lambda message: heard.append(("scheduler", message)),
                    "executor": lambda message: heard.append(("executor", message)),
                },
                lambda name, now, got, said: taps.append((name, now, len(got), len(said))),
            )
            mailbox.put(Abort(request_id=1))
            mailbox.put(Abort(request_id=2))
            await trio.sleep(10)
            mailbox.put(Abort(request_id=3))
            mailbox.close()

    trio.run(main, clock=VirtualClock())
    assert core.activations == [(0, 2), (5, 0), (10, 1)]
    assert heard == [
        ("scheduler", Abort(request_id=1)),
        ("scheduler", Abort(request_id=2)),
        ("executor", WorkerReady(pool_epoch=9)),
        ("scheduler", Abort(request_id=3)),
    ]
    assert taps == [("tokenizer", 0, 2, 2), ("tokenizer", 5, 0, 1), ("tokenizer", 10, 1, 1)]


async def test_an_exception_of_the_core_comes_out() -> None:
    class Broken(Echo):
        def handle(self, now_s: float, messages: Sequence[Message]) -> list[Said]:  # noqa: ARG002
            raise ZeroDivisionError

    mailbox: Mailbox[Message] = Mailbox("m", 8)
    mailbox.put(Abort(request_id=1))
    with pytest.raises(ZeroDivisionError):
        await run_actor("scheduler", Broken(), mailbox, {})


def test_a_timer_that_moves_fires_once_and_at_its_last_place() -> None:
    class Moving(Echo):
        """Each message moves the timer on by four seconds, from five."""

        def handle(self, now_s: float, messages: Sequence[Message]) -> list[Said]:
            said = super().handle(now_s, messages)
            if self.timer_s is not None:
                self.timer_s += 4 * len(messages)
            return said

    core = Moving(timer_s=5)

    async def main() -> None:
        mailbox: Mailbox[Message] = Mailbox("m", 8)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_actor, "tokenizer", core, mailbox, {"scheduler": _drop, "executor": _drop})
            await trio.sleep(3)
            mailbox.put(Abort(request_id=1))  # now at 9
            await trio.sleep(17)
            mailbox.put(Abort(request_id=2))
            mailbox.close()

    trio.run(main, clock=VirtualClock())
    assert core.activations == [(3, 1), (9, 0), (20, 1)]


def test_a_message_that_comes_with_the_timer_is_not_followed_by_an_empty_activation() -> None:
    core = Echo(timer_s=5)

    async def main() -> None:
        clock = VirtualClock.current()
        mailbox: Mailbox[Message] = Mailbox("m", 8)
        clock.call_at(5, lambda: mailbox.put(Abort(request_id=1)))
        clock.call_at(6, mailbox.close)
        await run_actor("tokenizer", core, mailbox, {"scheduler": _drop, "executor": _drop})

    trio.run(main, clock=VirtualClock())
    assert core.activations == [(5, 1)]


def _drop(message: Message) -> None:
    pass


class Heard(Recorder):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float, int, int]] = []
        self.broken: list[tuple[str, float, int, str]] = []

    def __call__(
        self, actor: Address, now_s: float, messages: Sequence[Message], said: Sequence[Said]
    ) -> None:
        self.told.append((actor, now_s, len(messages), len(said)))

    def broke(self, actor: Address, now_s: float, messages: Sequence[Message], error: Exception) -> None:
        self.broken.append((actor, now_s, len(messages), str(error)))


def test_a_recorder_is_told_of_the_activation_that_broke_and_other_taps_are_not() -> None:
    class Breaks(Echo):
        def handle(self, now_s: float, messages: Sequence[Message]) -> list[Said]:
            if len(self.activations) == 1:
                raise InvariantViolated("of no use any more")
            return super().handle(now_s, messages)

    recorder, plain = Heard(), list[float]()

    async def main() -> None:
        mailbox: Mailbox[Message] = Mailbox("m", 8)
        taps = Taps(recorder, lambda _name, now_s, _got, _said: plain.append(now_s))
        async with trio.open_nursery() as nursery:
            post = {"scheduler": _drop, "executor": _drop}
            nursery.start_soon(run_actor, "tokenizer", Breaks(), mailbox, post, taps)
            mailbox.put(Abort(request_id=1))
            await trio.sleep(1)
            mailbox.put(Abort(request_id=2))
            mailbox.put(Abort(request_id=3))

    with pytest.raises(ExceptionGroup) as raised:
        trio.run(main, clock=VirtualClock())
    assert raised.group_contains(InvariantViolated, match="of no use")
    assert recorder.told == [("tokenizer", 0, 1, 1)]
    assert recorder.broken == [("tokenizer", 1, 2, "of no use any more")]
    assert plain == [0]


class Panic(BaseException):
    pass


class Failing(Echo):
    def __init__(self, failure: BaseException) -> None:
        super().__init__()
        self.failure = failure

    def handle(self, now_s: float, messages: Sequence[Message]) -> list[Said]:
        super().handle(now_s, messages)
        raise self.failure


@pytest.mark.parametrize(
    ("failure", "raised"), [(Panic("secret"), InvariantViolated), (KeyboardInterrupt(), KeyboardInterrupt)]
)
async def test_a_panic_of_a_library_breaks_the_actor_and_not_the_program(
    failure: BaseException, raised: type[BaseException]
) -> None:
    mailbox: Mailbox[Message] = Mailbox("m", 8)
    mailbox.put(Abort(request_id=1))
    with pytest.raises(raised) as error:
        await run_actor("tokenizer", Failing(failure), mailbox, {})
    assert "secret" not in str(error.value)
