"""Stop strings in a growing text: what may be shown, and where the text ends.

Defined on the text alone, so that the result does not depend on how the text was cut into tokens: the text
ends at the first character that completes any stop string; of several completed by the same character the
one that begins first counts, which is the longest. What may be shown before that is everything but the
longest suffix that is still a proper prefix of some stop string.

Special tokens may be hidden: they are part of what the model wrote, but not of the text that is shown. A stop
string is looked for in both, in the text as it is shown and in the text with the hidden tokens written out,
there only as wholes: "<|im_end|>" and "x<|im_end|>\\n" are found, "<" or "end|>" do not end an answer at a
token that nobody sees. Where a stop string is found, the text shown ends before its first character.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds stop strings in text that arrives in pieces.

    Invariants: everything returned so far, joined, is a prefix of the text pushed; while nothing is found,
    what is missing from it could still become a stop string; once `found` is set, nothing more comes out.
    Cost: linear in the text times the number of stop strings (Knuth, Morris and Pratt's automaton per stop
    string), and a substring test alone for pieces that cannot begin one.

    Raises ValueError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty")
        self.found: str | None = None
        """The stop string that ended the text."""
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._first = frozenset(stop[0] for stop in stops)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._include_stop = include_stop
        self._written = [0] * len(self._stops)
        """How much of each stop string the text with hidden tokens ends with."""
        self._shown: list[int] = []
        """The same of the text that is shown, while a hidden token is in `_held`. Else both agree."""
        self._held = ""
        """The end of the text with hidden tokens that is not decided yet."""
        self._hidden: list[tuple[int, int]] = []
        """The hidden tokens in `_held`."""

    def push(self, text: str) -> str:
        """Take the next piece of text; return what can be shown now."""
        if self.found is not None:
            return ""
        if not self._held and self._first.isdisjoint(text):
            return text
        start = len(self._held)
        self._held += text
        if self._hidden:
            return self._push_beside_hidden(start)
        for end, char in enumerate(text, start + 1):
            stop = self._advance(self._written, char)
            if stop is not None:
                return self._end(stop, end - len(stop))
        whole, cut = self._held, len(self._held) - max(self._written)
        self._held = whole[cut:]
        return whole[:cut]

    def _push_beside_hidden(self, start: int) -> str:
        for end in range(start + 1, len(self._held) + 1):
            char = self._held[end - 1]
            stop = self._advance_beside_hidden(char, end)
            cut = end if stop is None else end - len(stop)
            if (other := self._advance(self._shown, char)) is not None:
                other_cut = self._start_of_shown(len(other), end)
                if other_cut < cut:
                    stop, cut = other, other_cut
            if stop is not None:
                return self._end(stop, cut)
        return self._release()

    def push_hidden(self, token: str) -> str:
        """Take a hidden token's spelling; return what can be shown now."""
        if self.found is not None or not token:
            return ""
        if not self._held and not any(token in stop for stop in self._stops):
            return ""
        if not self._hidden:
            self._shown = list(self._written)
        start = len(self._held)
        self._held += token
        self._hidden.append((start, len(self._held)))
        for end in range(start + 1, len(self._held) + 1):
            stop = self._advance_beside_hidden(self._held[end - 1], end)
            if stop is not None:
                return self._end(stop, end - len(stop))
        return self._release()

    def flush(self) -> str:
        """The text is over: return what was held back (nothing if a stop string was found)."""
        text = self._visible(len(self._held))
        self._forget()
        return text

    def _advance(self, matched: list[int], char: str) -> str | None:
        """Feed one character to every automaton; the longest stop string it completes, if any."""
        completed = None
        for index, stop in enumerate(self._stops):
            length, failures = matched[index], self._failures[index]
            while length and stop[length] != char:
                length = failures[length - 1]
            if stop[length] == char:
                length += 1
            if length == len(stop):
                completed = completed or stop
                length = failures[length - 1]
            matched[index] = length
        return completed

    def _advance_beside_hidden(self, char: str, end: int) -> str | None:
        """The same for the text with hidden tokens, where only what begins and ends outside of them or at
        their edges counts. `end`: where in `_held` the character ends."""
        completed = None
        for index, stop in enumerate(self._stops):
            length, failures = self._written[index], self._failures[index]
            while length and stop[length] != char:
                length = failures[length - 1]
            length = self._whole_tokens(length + (stop[length] == char), failures, end)
            if length == len(stop):
                if not self._is_inside(end):
                    completed = completed or stop
                length = self._whole_tokens(failures[length - 1], failures, end)
            self._written[index] = length
        return completed

    def _whole_tokens(self, length: int, failures: list[int], end: int) -> int:
        """The longest of the matches up to `length` that does not begin inside a hidden token."""
        while length and self._is_inside(end - length):
            length = failures[length - 1]
        return length

    def _is_inside(self, position: int) -> bool:
        """Whether a hidden token stands on both sides of a position in `_held`."""
        return any(start < position < end for start, end in self._hidden)

    def _end(self, stop: str, cut: int) -> str:
        text = self._visible(cut) + (stop if self._include_stop else "")
        self.found = stop
        self._forget()
        return text

    def _release(self) -> str:
        """Give out what cannot become part of a stop string any more."""
        whole = len(self._held)
        cut = whole - max(self._written)
        cut = min(cut, self._start_of_shown(max(self._shown), whole))
        text = self._visible(cut)
        self._held = self._held[cut:]
        self._hidden = [(start - cut, end - cut) for start, end in self._hidden if start >= cut]
        return text

    def _visible(self, end: int) -> str:
        """What of `_held` up to `end` is shown."""
        pieces, at = [], 0
        for hidden_start, hidden_end in self._hidden:
            if hidden_start < end:
                pieces.append(self._held[at:hidden_start])
                at = hidden_end
        return "".join(pieces) + self._held[at:end]

    def _start_of_shown(self, num_chars: int, end: int) -> int:
        """Where in `_held` the last `num_chars` shown characters before `end` begin."""
        for hidden_start, hidden_end in reversed(self._hidden):
            if hidden_end <= end:
                if end - hidden_end >= num_chars:
                    break
                num_chars -= end - hidden_end
                end = hidden_start
        return end - num_chars

    def _forget(self) -> None:
        self._held, self._hidden = "", []
        self._written = [0] * len(self._stops)


def _failure_table(pattern: str) -> list[int]:
    """table[i]: length of the longest proper prefix of pattern[: i + 1] that is also its suffix."""
    table = [0] * len(pattern)
    matched = 0
    for index in range(1, len(pattern)):
        while matched and pattern[matched] != pattern[index]:
            matched = table[matched - 1]
        if pattern[matched] == pattern[index]:
            matched += 1
        table[index] = matched
    return table
