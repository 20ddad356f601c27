"""How much one rendering of a template may do: the part of the sandbox that counts.

A template is a program from a model's file. Bounded are steps (loop turns, calls, look-ups, filters, tests,
operators, and items of values that are walked over), characters made (output and intermediate strings
together), and the size of integers, each by a number that does not depend on the machine, so that a template
is refused everywhere or nowhere. A last bound on the thread's own CPU time covers what those price too low; a
paused or busy machine does not use it up, and it is some five times what all steps take on a slow machine.
Memory follows from the first two: a step makes at most one small object.
"""

from __future__ import annotations

import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any

from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.utils import Namespace

MAX_STEPS = 1_000_000
MAX_CHARS = 64_000_000
MAX_INTEGER_BITS = 1024
MAX_CPU_S = 10.0

CHARS_PER_STEP = 4096
"""Copying this many characters costs about as much as one step of the interpreter."""
_CHARS_PER_NUMBER = 48
_CHARS_PER_ITEM = 4
CHARS_PER_REPR = 10
"""A character in a text within a list may be written as `\\U000e0001`."""
_CHUNK = 1 << 16

_ITEMS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


class BudgetExceeded(TemplateRuntimeError):
    """The template tried to do more than it may."""


class Budget:
    """What is left for one rendering."""

    def __init__(self) -> None:
        self._steps_left = MAX_STEPS
        self._chars_left = MAX_CHARS
        self._cpu_end_s = time.thread_time() + MAX_CPU_S
        self._next_look = MAX_STEPS

    def step(self, count: int = 1) -> None:
        """Pay for work that takes `count` steps."""
        self._steps_left -= count
        if self._steps_left < 0:
            raise BudgetExceeded(f"it takes more than {MAX_STEPS} steps")
        if self._steps_left < self._next_look:
            self._next_look = self._steps_left - 64
            if time.thread_time() > self._cpu_end_s:
                raise BudgetExceeded(f"it takes more than {MAX_CPU_S:.0f} s")

    def make(self, num_chars: int) -> None:
        """Pay for a string of `num_chars` characters, before it is made."""
        self._chars_left -= num_chars
        if self._chars_left < 0:
            raise BudgetExceeded(f"it makes more than {MAX_CHARS} characters")
        self.step(1 + num_chars // CHARS_PER_STEP)

    def integer(self, num_bits: int) -> None:
        """Ask before an integer of `num_bits` bits is made."""
        if num_bits > MAX_INTEGER_BITS:
            raise BudgetExceeded(f"it makes an integer of {num_bits} bits, more than {MAX_INTEGER_BITS}")

    def scan(self, num_chars: int, num_other: int) -> None:
        """Pay for a search that compares every character of a text with every one of another."""
        self.step(1 + num_chars * num_other // CHARS_PER_STEP)

    def read(self, values: Iterable[object]) -> int:
        """Pay for work that reads every part of `values`; returns their size as `walk` does."""
        size = sum(map(self.walk, values))
        self.step(1 + size // CHARS_PER_STEP)
        return size

    def text(self, value: object) -> None:
        """Pay for `str(value)`. Raises SecurityError for what is not data, or holds such a thing."""
        size = self.walk(value, to_write=True)
        self.make(size if isinstance(value, str) else CHARS_PER_REPR * size)

    def pieces(self, text: str, separator: str | None) -> None:
        """Pay for the parts that `text` is split into. Without a separator it is split at blanks."""
        if separator:
            self.step(1 + text.count(separator))
            return
        for start in range(0, len(text), _CHUNK):
            self.step(1 + len(text[start : start + _CHUNK].split()))

    def lines(self, text: str) -> None:
        """Pay for the lines that `text` is split into."""
        for start in range(0, len(text), _CHUNK):
            self.step(1 + len(text[start : start + _CHUNK].splitlines()))

    def each(self, values: Iterable[Any]) -> Iterator[Any]:
        """The same items, each paid for when it is taken."""
        for value in values:
            self.step()
            yield value

    def walk(self, value: object, to_write: bool = False) -> int:
        """Number of characters of `value` when written out, roughly; costs a step per item.

        A part that is shared is walked as often as it would be written: a small value with exponentially many
        parts is found out here, before anything writes, compares or copies it.
        """
        if isinstance(value, str):
            return len(value)
        if isinstance(value, int):
            num_bits = value.bit_length()
            self.integer(num_bits)
            return 6 + num_bits // 3
        if isinstance(value, Mapping):
            self.step(1 + len(value))
            return sum(
                self.walk(key, to_write) + self.walk(item, to_write) + _CHARS_PER_ITEM
                for key, item in value.items()
            )
        if isinstance(value, _ITEMS):
            self.step(1 + len(value))
            return sum(self.walk(item, to_write) + _CHARS_PER_ITEM for item in value)
        if isinstance(value, range):
            self.step(1 if to_write else len(value))
            return 3 * _CHARS_PER_NUMBER
        if value is None or isinstance(value, float | complex | Undefined):
            return _CHARS_PER_NUMBER
        if to_write and not isinstance(value, Macro | LoopContext | Namespace):
            raise SecurityError(f"a {type(value).__name__} cannot be written out")
        return 2 * _CHARS_PER_NUMBER + 200  # the name of a macro


def nesting(value: object) -> int:
    """How many lists and mappings stand around the innermost value. `walk` has paid for it."""
    if isinstance(value, Mapping):
        return 1 + max(map(nesting, value.values()), default=0)
    if isinstance(value, Sequence) and not isinstance(value, str | range):
        return 1 + max(map(nesting, value), default=0)
    return 0
