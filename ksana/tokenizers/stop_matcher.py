"""Stop strings in a growing text: what may be shown, and where the text ends.

Defined on the text alone, so that the result does not depend on how the text was cut into tokens: the text
ends at the first character that completes any stop string; of several completed by the same character the
longest counts. What may be shown before that is everything but the longest suffix that is still a proper
prefix of some stop string.
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
        self._matched = [0] * len(self._stops)
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> str:
        """Take the next piece of text; return what can be shown now."""
        if self.found is not None:
            return ""
        if not self._held and self._first.isdisjoint(text):
            return text
        start = len(self._held)
        whole = self._held + text
        for position, char in enumerate(text, start):
            stop = self._advance(char)
            if stop is not None:
                self.found, self._held = stop, ""
                end = position + 1
                return whole[: end if self._include_stop else end - len(stop)]
        shown = len(whole) - max(self._matched)
        self._held = whole[shown:]
        return whole[:shown]

    def flush(self) -> str:
        """The text is over: return what was held back (nothing if a stop string was found)."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> str | None:
        """Feed one character to every automaton; the longest stop string it completes, if any."""
        completed = None
        for index, stop in enumerate(self._stops):
            matched, failures = self._matched[index], self._failures[index]
            while matched and stop[matched] != char:
                matched = failures[matched - 1]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                completed = completed or stop
                matched = failures[matched - 1]
            self._matched[index] = matched
        return completed


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
