"""The order of merges derived from scores, on vocabularies small enough to see it."""

from __future__ import annotations

from ksana.tokenizers.sentencepiece_merges import EqualScores, derive_merges


def merges(tokens: list[str], ranks: list[float], **options: object) -> list[str]:
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    return [f"{left} {right}" for left, right in derive_merges(ranks, ids, **options)]  # type: ignore[arg-type]


def test_the_join_of_the_lowest_rank_comes_first() -> None:
    tokens = ["a", "b", "c", "abc", "ab", "bc"]
    assert merges(tokens, [9, 9, 9, 3, 2, 1]) == ["b c", "a b", "a bc", "ab c"]


def test_equal_ranks_go_by_ids_of_join_left_and_right() -> None:
    tokens = ["xx", "xxxx", "xxx", "x"]
    assert merges(tokens, [1, 1, 1, 9]) == ["x x", "xx xx", "xxx x", "x xxx", "xx x", "x xx"]


def test_or_by_length_the_longest_left_part_first() -> None:
    tokens = ["xx", "xxxx", "xxx", "x"]
    found = merges(tokens, [1, 1, 1, 9], equal_scores=EqualScores.LONGEST_FIRST)
    assert found == ["xxx x", "xx xx", "xx x", "x xxx", "x xx", "x x"]


def test_whole_tokens_are_neither_joined_nor_cut() -> None:
    assert merges(["a", "b", "ab", "aab"], [1, 1, 1, 1], whole=[2]) == []
    assert merges(["a", "b", "ab", "aab"], [1, 1, 1, 1]) == ["a b", "a ab"]
