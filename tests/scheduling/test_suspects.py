from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ksana.scheduling.suspects import Trials


def test_without_trials_everybody_may_run() -> None:
    assert Trials().may_run(7)
    assert not Trials().active


def test_halves_are_tried_in_turn() -> None:
    trials = Trials()
    trials.split([1, 2, 3])
    assert trials.groups == [[1, 2], [3]]
    assert trials.may_run(2)
    assert not trials.may_run(3)
    assert not trials.may_run(9)
    assert not trials.forget([1])
    assert trials.forget([2])
    assert trials.may_run(3)
    assert trials.forget([3])
    assert not trials.active


def test_members_not_in_flight_stay_a_group_of_their_own() -> None:
    trials = Trials()
    trials.split([1, 2, 3, 4, 5, 6, 7, 8])
    trials.split([1, 3])
    assert trials.groups == [[1], [3], [2, 4], [5, 6, 7, 8]]


def test_a_crash_of_nobody_changes_nothing() -> None:
    trials = Trials(groups=[[1], [2]])
    trials.split([])
    assert trials.groups == [[1], [2]]


@given(st.integers(1, 64), st.data())
def test_groups_never_overlap_and_nobody_is_lost(num_suspects: int, data: st.DataObject) -> None:
    trials = Trials()
    trials.split(list(range(num_suspects)))
    left = set(range(num_suspects))
    while trials.active:
        members = [member for group in trials.groups for member in group]
        assert sorted(members) == sorted(left)
        assert all(trials.groups)
        first = trials.groups[0]
        if len(first) > 1 and data.draw(st.booleans()):
            trials.split(sorted(data.draw(st.sets(st.sampled_from(first), min_size=1))))
            if data.draw(st.booleans()) or len(trials.groups[0]) > 1:
                continue
            first = trials.groups[0]
        left -= set(first)
        assert trials.forget(first)
    assert not left
