from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana.tokenizers.stop_matcher import StopMatcher

letters = st.text("ab.", max_size=12)
stop_lists = st.lists(st.text("ab.", min_size=1, max_size=5), max_size=4)


def ended_text(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition, by trying every prefix."""
    for end in range(len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            stop = max(completed, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include)
    shown = [matcher.push(piece) for piece in pieces] + [matcher.flush()]
    return shown, matcher.found


@given(st.lists(letters, max_size=8), stop_lists, st.booleans())
def test_any_cutting_of_the_text_gives_what_the_definition_gives(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    shown, found = run(pieces, stops, include)
    assert ("".join(shown), found) == ended_text("".join(pieces), stops, include)


@given(st.lists(letters, max_size=8), stop_lists)
def test_only_what_may_become_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher, pushed, shown = StopMatcher(stops), "", ""
    for piece in pieces:
        pushed, shown = pushed + piece, shown + matcher.push(piece)
        if matcher.found is not None:
            return
        held = pushed[len(shown) :]
        longest = max((k for stop in stops for k in range(len(stop)) if pushed.endswith(stop[:k])), default=0)
        assert len(held) == longest
    assert shown + matcher.flush() == pushed


def test_a_stop_string_over_three_tokens_leaves_the_text_before_it_in_the_same_token() -> None:
    assert run(["one ", "two\n", "\nUs", "er: x"], ["\n\nUser:"]) == (
        ["one ", "two", "", "", ""],
        "\n\nUser:",
    )


def test_what_was_held_back_comes_out_when_it_goes_on_differently() -> None:
    assert run(["a\n", "\nUs", "eful"], ["\n\nUser:"]) == (["a", "", "\n\nUseful", ""], None)


def test_what_was_held_back_comes_out_at_the_end() -> None:
    assert run(["a\n", "\nUs"], ["\n\nUser:"]) == (["a", "", "\n\nUs"], None)


def test_included_stop_string_ends_the_text_and_nothing_follows_it() -> None:
    assert run(["abSTOPcd", "more"], ["STOP"], include=True) == (["abSTOP", "", ""], "STOP")


def test_the_stop_string_completed_first_counts_and_of_two_the_longer() -> None:
    assert run(["xabcd"], ["abcd", "bc"])[1] == "bc"
    assert run(["xabc"], ["bc", "abc"]) == (["x", ""], "abc")


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""])


def test_a_thousand_characters_that_nearly_match_take_linear_time() -> None:
    stop = "a" * 999 + "b"
    shown, found = run(["a" * 1000] * 100 + ["b"], [stop])
    assert found == stop
    assert "".join(shown) == "a" * (100_000 - 999)
