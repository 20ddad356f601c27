import math

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ksana.loading.breaker import BreakerSettings, BreakerState, CircuitBreaker

SETTINGS = BreakerSettings(failures_to_open=3, first_wait_s=1.0, max_wait_s=4.0, probe_timeout_s=5.0)


def test_opens_after_failures_in_a_row_only() -> None:
    breaker = CircuitBreaker(SETTINGS)
    for _ in range(10):
        breaker.failed(0.0)
        breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.allows
    assert breaker.next_timer_s() is None
    for now_s in (1.0, 2.0, 3.0):
        assert breaker.allows
        breaker.failed(now_s)
    assert not breaker.allows
    assert breaker.next_timer_s() == 4.0


def test_light_and_heavy_calls_are_counted_apart() -> None:
    breaker = CircuitBreaker(SETTINGS)
    for _ in range(2):
        breaker.failed(0.0, "light")
        breaker.failed(0.0, "heavy")
    breaker.succeeded("light")
    breaker.failed(0.0, "light")
    assert breaker.allows
    breaker.failed(1.0, "heavy")
    assert breaker.next_timer_s() == 2.0
    assert breaker.start_probe(2.0)
    breaker.probe_succeeded()
    breaker.succeeded("light")
    breaker.failed(3.0, "heavy")
    assert breaker.next_timer_s() == 5.0, "a light success does not shorten the wait"


def test_one_timeout_opens() -> None:
    breaker = CircuitBreaker(SETTINGS)
    breaker.timed_out(7.0)
    assert not breaker.allows
    assert breaker.state.num_openings == 1


def test_late_answers_of_calls_under_way_change_nothing_while_open() -> None:
    breaker = CircuitBreaker(SETTINGS)
    breaker.timed_out(0.0)
    before = breaker.state
    breaker.timed_out(0.5)
    breaker.failed(0.5)
    breaker.succeeded()
    breaker.probe_succeeded()
    breaker.probe_failed(0.5)
    assert breaker.state == before


def test_one_probe_at_a_time_and_the_wait_doubles_up_to_its_cap() -> None:
    breaker = CircuitBreaker(SETTINGS)
    breaker.timed_out(0.0)
    assert not breaker.start_probe(0.999)
    now_s, waits = 0.0, []
    for _ in range(5):
        due_s = breaker.next_timer_s()
        assert due_s is not None
        waits.append(due_s - now_s)
        assert breaker.start_probe(due_s)
        assert not breaker.start_probe(due_s)
        assert not breaker.allows
        now_s = due_s + 0.25
        breaker.probe_failed(now_s)
    assert waits == [1.0, 2.0, 4.0, 4.0, 4.0]


def test_after_a_good_probe_one_failure_opens_again_with_a_longer_wait_until_a_call_succeeds() -> None:
    breaker = CircuitBreaker(SETTINGS)
    breaker.timed_out(0.0)
    assert breaker.start_probe(1.0)
    breaker.probe_succeeded()
    assert breaker.allows
    breaker.failed(10.0)
    assert breaker.next_timer_s() == 12.0
    assert breaker.start_probe(12.0)
    breaker.probe_succeeded()
    breaker.succeeded()
    breaker.failed(20.0)
    assert breaker.allows
    breaker.timed_out(20.0)
    assert breaker.next_timer_s() == 21.0


def test_a_probe_that_says_nothing_counts_as_failed() -> None:
    breaker = CircuitBreaker(SETTINGS)
    breaker.timed_out(0.0)
    assert breaker.start_probe(1.0)
    assert breaker.next_timer_s() == 6.0
    assert not breaker.start_probe(6.0)
    assert breaker.next_timer_s() == 8.0
    assert breaker.start_probe(8.0)
    breaker.probe_succeeded()
    assert breaker.allows


def test_the_state_survives_the_wire_and_goes_on() -> None:
    breaker = CircuitBreaker(SETTINGS)
    breaker.timed_out(3.0)
    again = CircuitBreaker(
        SETTINGS, msgspec.msgpack.decode(msgspec.msgpack.encode(breaker.state), type=BreakerState)
    )
    assert again.state == breaker.state
    assert again.start_probe(4.0)


@pytest.mark.parametrize(
    "wrong",
    [{"failures_to_open": 0}, {"first_wait_s": 0.0}, {"first_wait_s": 100.0}, {"probe_timeout_s": 0.0}],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        BreakerSettings(**wrong)  # type: ignore[arg-type]


class Machine(RuleBasedStateMachine):
    """Whatever comes in whatever order: it is never stuck open, never two probes, waits within bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = CircuitBreaker(SETTINGS)
        self.now_s = 0.0
        self.in_a_row = 0

    @rule(seconds=st.floats(min_value=0, max_value=20))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def a_call_succeeds(self) -> None:
        self.breaker.succeeded()
        if self.breaker.allows:
            self.in_a_row = 0

    @rule()
    def a_call_fails(self) -> None:
        allowed = self.breaker.allows
        self.breaker.failed(self.now_s)
        if allowed:
            self.in_a_row += 1
            assert self.breaker.allows == (self.in_a_row < SETTINGS.failures_to_open)

    @rule()
    def a_call_times_out(self) -> None:
        self.breaker.timed_out(self.now_s)
        assert not self.breaker.allows

    @rule(good=st.sampled_from([True, False, None]))
    def the_timer_comes(self, good: bool | None) -> None:
        due_s = self.breaker.next_timer_s()
        if due_s is None:
            return
        self.now_s = max(self.now_s, due_s)
        was_open = self.breaker.state.phase == "open"
        started = self.breaker.start_probe(self.now_s)
        assert started == was_open
        if not started or good is None:
            return
        if good:
            self.breaker.probe_succeeded()
            self.in_a_row = SETTINGS.failures_to_open - 1
            assert self.breaker.allows
        else:
            self.breaker.probe_failed(self.now_s)
            assert self.breaker.state.phase == "open"

    @invariant()
    def closed_or_with_a_timer_in_sight(self) -> None:
        due_s = self.breaker.next_timer_s()
        assert self.breaker.allows == (due_s is None)
        if due_s is not None:
            limit_s = max(SETTINGS.max_wait_s, SETTINGS.probe_timeout_s)
            assert math.isfinite(due_s)
            assert due_s <= self.now_s + limit_s


TestMachine = Machine.TestCase
