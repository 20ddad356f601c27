from __future__ import annotations

import pytest
from hypothesis import given, settings
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


# Hidden tokens


Item = tuple[str, bool]
"""A piece of what the model wrote, and whether it is a hidden token."""

written = st.lists(st.tuples(st.text("ab<>", min_size=1, max_size=4), st.booleans()), max_size=8)
stops_with_tokens = st.lists(st.text("ab<>", min_size=1, max_size=7), min_size=1, max_size=4)


def ended_items(items: list[Item], stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition, by trying every end and every beginning."""
    whole, is_shown, edges = "", [], {0}
    ends = []
    for text, hidden in items:
        for char in text:
            whole += char
            is_shown.append(not hidden)
            if not hidden:
                edges |= {len(whole) - 1, len(whole)}
                ends.append(len(whole))
        if hidden:
            edges |= {len(whole) - len(text), len(whole)}
            ends.append(len(whole))

    def shown(start: int, end: int) -> str:
        return "".join(whole[i] for i in range(start, end) if is_shown[i])

    for end in ends:
        found = []
        for stop in stops:
            start = end - len(stop)
            if start in edges and whole[:end].endswith(stop):
                found.append((-start, len(stop), stop))
            if is_shown[end - 1] and shown(0, end).endswith(stop):
                start = max(i for i in range(end) if shown(i, end) == stop)
                found.append((-start, len(stop), stop))
        if found:
            start, _, stop = max(found)
            return shown(0, -start) + (stop if include else ""), stop
    return shown(0, len(whole)), None


def run_items(items: list[Item], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include)
    pieces = [matcher.push_hidden(text) if hidden else matcher.push(text) for text, hidden in items]
    return [*pieces, matcher.flush()], matcher.found


@given(written, stops_with_tokens, st.booleans())
@settings(max_examples=1000)
def test_hidden_tokens_are_found_as_the_definition_says(
    items: list[Item], stops: list[str], include: bool
) -> None:
    pieces, found = run_items(items, stops, include)
    assert ("".join(pieces), found) == ended_items(items, stops, include)


@given(written, stops_with_tokens)
@settings(max_examples=500)
def test_beside_hidden_tokens_too_only_what_may_become_a_stop_string_is_held_back(
    items: list[Item], stops: list[str]
) -> None:
    matcher, shown = StopMatcher(stops), ""
    for index, (text, hidden) in enumerate(items):
        shown += matcher.push_hidden(text) if hidden else matcher.push(text)
        if matcher.found is not None:
            return
        sofar = items[: index + 1]
        all_shown = "".join(one for one, is_hidden in sofar if not is_hidden)
        beginnings = {stop[:k] for stop in stops for k in range(1, len(stop))}
        # Every suffix, as shown and as written from the edge of a token or a shown character on.
        held = [0]
        held += [len(one) for one in beginnings if all_shown.endswith(one)]
        for start, (one, is_hidden) in enumerate(sofar):
            rest = "".join(text for text, _ in sofar[start + 1 :])
            num_shown = sum(len(text) for text, is_hidden in sofar[start + 1 :] if not is_hidden)
            for cut in [0] if is_hidden else range(len(one)):
                if one[cut:] + rest in beginnings:
                    held.append(num_shown + (0 if is_hidden else len(one) - cut))
        assert shown == all_shown[: len(all_shown) - max(held)]


EOS = ("<|im_end|>", True)


@pytest.mark.parametrize(
    ("items", "stop", "shown"),
    [
        ([("Hi", False), EOS, ("more", False)], "<|im_end|>", ["Hi", "", "", ""]),
        ([("Hi", False), EOS, ("\nmore", False)], "<|im_end|>\n", ["Hi", "", "", ""]),
        ([("Hi foo", False), EOS], "foo<|im_end|>", ["Hi ", "", ""]),
        ([("a", False), EOS, EOS], "<|im_end|><|im_end|>", ["a", "", "", ""]),
        ([("a", False), ("<pad>", True), ("b", False), EOS], "a<pad>b<|im_end|>", ["", "", "", "", ""]),
        ([("<|im", False), ("_end|>", False)], "<|im_end|>", ["", "", ""]),
        ([("fo", False), EOS, ("o", False)], "foo", ["", "", "", ""]),
    ],
)
def test_stop_strings_with_special_tokens(items: list[Item], stop: str, shown: list[str]) -> None:
    assert run_items(items, [stop]) == (shown, stop)


@pytest.mark.parametrize("stop", ["<", "|", "end", "end|>", "<|im_end", "a<", "a<|im_end|", "|>\n"])
def test_a_part_of_a_hidden_token_ends_nothing(stop: str) -> None:
    items = [("a", False), EOS, ("\nb", False)]
    pieces, found = run_items(items, [stop])
    assert ("".join(pieces), found) == ("a\nb", None)


def test_an_included_stop_string_is_shown_as_it_was_asked_for() -> None:
    items = [("a foo", False), EOS, ("b", False)]
    assert run_items(items, ["foo<|im_end|>"], include=True) == (
        ["a ", "foo<|im_end|>", "", ""],
        "foo<|im_end|>",
    )


def test_many_hidden_tokens_take_linear_time() -> None:
    stop = "<x>" * 300 + "b"
    pieces, found = run_items([("<x>", True), ("a", False)] * 10_000 + [("<x>", True)] * 5_000, [stop])
    assert found is None
    assert "".join(pieces) == "a" * 10_000
