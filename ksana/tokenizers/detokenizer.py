"""Token ids to text, one at a time, giving out only what no later token can change.

The text of ids is defined in one place, here: their bytes joined and read as UTF-8, where only bytes that
are really invalid become U+FFFD, less the spaces SentencePiece puts before a text's first word. For
byte-level vocabularies that is exactly what the `tokenizers` package decodes. For SentencePiece it is the
same whenever the bytes are valid; where they are not, `tokenizers` replaces every byte of the whole run of
byte tokens, good ones too, which a stream could not foresee; SentencePiece and we replace the bad ones.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence, Set

from ksana.tokenizers.pieces import TokenPieces

_LONGEST_CHARACTER = 4
"""Bytes of UTF-8."""


class Detokenizer:
    """The text of one growing sequence of ids.

    Invariant: the joined results of `push` and one final `flush` equal the text of all ids at once.
    State: at most three bytes of an unfinished character, and how many leading spaces are still to be cut.
    Cost: about 1 µs per token.
    """

    def __init__(
        self, pieces: TokenPieces, hidden_ids: Set[int] = frozenset(), prompt_ids: Sequence[int] = ()
    ) -> None:
        """Tokens of `hidden_ids` have no text. The text follows that of `prompt_ids`: a leading space is
        kept if the prompt has text, and a character begun by the prompt's last tokens is completed.
        """
        self._pieces = pieces
        self._hidden_ids = hidden_ids
        self._pending = b""
        self._strip_left = pieces.strip_left
        if prompt_ids:
            self._follow(prompt_ids)

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; often a whole word, sometimes nothing.

        An id outside the vocabulary has no text.
        """
        if token_id in self._hidden_ids:
            return ""
        data = self._pending + self._pieces[token_id]
        text, num_read = codecs.utf_8_decode(data, self._pieces.errors, False)
        self._pending = data[num_read:]
        return self._strip(text) if self._strip_left else text

    def flush(self) -> str:
        """No more tokens: an unfinished character becomes U+FFFD."""
        text, _ = codecs.utf_8_decode(self._pending, self._pieces.errors, True)
        self._pending = b""
        return self._strip(text) if self._strip_left else text

    def _strip(self, text: str) -> str:
        num_spaces = min(len(text) - len(text.lstrip(" ")), self._strip_left)
        self._strip_left = self._strip_left - num_spaces if num_spaces == len(text) else 0
        return text[num_spaces:]

    def _follow(self, prompt_ids: Sequence[int]) -> None:
        if self._strip_left and any(self._shown(prompt_ids)):
            self._strip_left = 0
        tail = b""
        for piece in self._shown(reversed(prompt_ids)):
            tail = piece + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        _, num_read = codecs.utf_8_decode(tail, self._pieces.errors, False)
        self._pending = tail[num_read:]

    def _shown(self, token_ids: Iterable[int]) -> Iterable[bytes]:
        return (self._pieces[token_id] for token_id in token_ids if token_id not in self._hidden_ids)
