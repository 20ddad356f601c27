"""Merges of a SentencePiece BPE vocabulary, which GGUF files leave out.

SentencePiece joins, among neighbouring pieces, the two whose join has the best score. The `tokenizers`
package wants that as a list of pairs, best first: every way to cut a token in two tokens, ordered by its
score.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def derive_merges(
    ranks: Sequence[float], ids: Mapping[str, int], whole: Iterable[int] = ()
) -> list[tuple[str, str]]:
    """All pairs of tokens whose join is a token, the join with the lowest rank first.

    `ids` maps each token to its id, `ranks` has a rank per id. Tokens of `whole` are never joined or cut
    (control tokens, byte tokens). Of several cuts of one token the one with the longer left part comes first.
    About 1 s for 262,144 tokens.
    """
    left_out = set(whole)
    usable = {token: token_id for token, token_id in ids.items() if token_id not in left_out}
    find = usable.get
    cuts: list[tuple[float, int, int, str, str]] = []
    for token, token_id in usable.items():
        rank = ranks[token_id]
        for cut in range(1, len(token)):
            left = find(token[:cut])
            if left is not None and find(token[cut:]) is not None:
                cuts.append((rank, -cut, cut - len(token), token[:cut], token[cut:]))
    # Equal ranks: longer left part, then longer right part, then the order of ids (the sort is stable).
    cuts.sort(key=lambda cut: cut[:3])
    return [(left, right) for _, _, _, left, right in cuts]
