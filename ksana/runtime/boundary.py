"""What goes wrong with the text of one request stays with that request.

Prompts, templates and vocabularies come from outside, and the libraries that read them fail in their own
ways: a panic of the `tokenizers` package is not even an `Exception`. Whoever works on one request's text
catches everything and asks here what must not be caught.
"""

from __future__ import annotations

from types import TracebackType

import trio

from ksana.errors import InvariantViolated

_NOT_OF_A_REQUEST = (KeyboardInterrupt, SystemExit, GeneratorExit, trio.Cancelled, InvariantViolated)


def harms_only_its_request(error: BaseException) -> bool:
    """False for what ends more than a request: a cancellation, the program's end, a bug in our own state."""
    return not isinstance(error, _NOT_OF_A_REQUEST)


def described(error: BaseException) -> str:
    """Class and place of an error, for a log. Not its text, which may quote the prompt."""
    place = _place(error.__traceback__)
    return type(error).__name__ if place is None else f"{type(error).__name__} at {place}"


def _place(trace: TracebackType | None) -> str | None:
    if trace is None:
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return f"{code.co_filename.rpartition('/')[2]}:{trace.tb_lineno} ({code.co_name})"
