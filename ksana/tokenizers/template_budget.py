"""How much one rendering of a template may do: the part of the sandbox that counts.

A template is a program from a model's file. Bounded are steps (loop turns, calls, filters, tests, operators,
and items of values that are walked over), characters made (output and intermediate strings together), and
the size of integers, each by a number that does not depend on the machine. A last bound on the thread's own
CPU time covers what those price too low; a paused or busy machine does not use it up.
"""

from __future__ import annotations

import time
from collections.abc import ItemsView, Iterable, KeysView, Mapping, ValuesView

from jinja2.exceptions import TemplateRuntimeError
from jinja2.runtime import Undefined

MAX_STEPS = 1_000_000
MAX_CHARS = 64_000_000
MAX_INTEGER_BITS = 1024
MAX_CPU_S = 5.0

CHARS_PER_STEP = 4096
"""Copying this many characters costs about as much as one step of the interpreter."""


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

    def read(self, values: Iterable[object]) -> int:
        """Pay for work that reads every part of `values`; returns their size as `walk` does."""
        size = sum(map(self.walk, values))
        self.step(1 + size // CHARS_PER_STEP)
        return size

    def walk(self, value: object) -> int:
        """Number of characters of `value` when written out, roughly; costs a step per item.

        A part that is shared is walked as often as it would be written: a small value with exponentially many
        parts is found out here, before anything writes, compares or copies it.
        """
        if isinstance(value, str):
            return len(value)
        if isinstance(value, Mapping):
            self.step(1 + len(value))
            return sum(self.walk(key) + self.walk(item) + 6 for key, item in value.items())
        if isinstance(value, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
            self.step(1 + len(value))
            return sum(self.walk(item) + 4 for item in value)
        if isinstance(value, range):
            self.step(len(value))
        if isinstance(value, int):
            self.integer(value.bit_length())
        return 0 if isinstance(value, Undefined) else 24
